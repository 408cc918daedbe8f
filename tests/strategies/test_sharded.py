"""Sharded weights: equal to synchronous training, 1/p of the state, whole files; refusals."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from threaded_optimizers import (
    SHAPES,
    continue_from,
    equal,
    gradients,
    new_weights,
    save,
    train,
    wrap,
)

from tfcommx.collectives import comm as comm_module
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import (
    CheckpointError,
    ConfigurationError,
    PlanError,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)
from tfcommx.keras_internals.optimizers import copy_state, plain_copy, steps_of
from tfcommx.keras_internals.shards import require_shardable
from tfcommx.optim.sharding import Sharding
from tfcommx.optim.step_boundary import consolidate
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.strategies import Sharded
from tfcommx.strategies.sharded.shards import lay_out

K = keras.optimizers


def momentum() -> K.Optimizer:
    return K.SGD(0.1, momentum=0.9)


def adamw() -> K.Optimizer:
    optimizer = K.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


ELEMENTWISE = {
    "sgd": lambda: K.SGD(0.1),
    "momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: K.Adam(0.01, amsgrad=True),
    "adamw": adamw,
    "rmsprop": lambda: K.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: K.Adagrad(0.1),
    "adamax": lambda: K.Adamax(0.01),
    "nadam": lambda: K.Nadam(0.01),
    "lion": lambda: K.Lion(0.001, weight_decay=0.01),
    "adadelta": lambda: K.Adadelta(1.0),
    "ftrl": lambda: K.Ftrl(0.1),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.05),
    "average": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulation": lambda: K.SGD(0.1, weight_decay=0.01, gradient_accumulation_steps=2),
}
PROFILE = Profile(
    "m",
    tuple(
        VariableProfile(path, shape, ready_s=1.0, forward_s=1.0)
        for path, shape in reversed(SHAPES.items())
    ),
    4.0,
    2.0,
    batch=1,
)
PULLS = [Sharded(), Sharded("layers"), Sharded("batched", PROFILE)]


@pytest.mark.parametrize(
    "name", [case(name, kept=name in ("adamw", "nadam", "ftrl")) for name in ELEMENTWISE]
)
def test_elementwise_optimizers_are_equal_to_synchronous_training_to_the_bit(name: str) -> None:
    """Law 1 and 3. Four ranks, whose average is exact; entries do not divide evenly."""
    topology = Topology(2, 2)
    plain = train(ELEMENTWISE[name], "synchronous", topology)
    assert equal([plain[0]] * 4, plain)
    for strategy in PULLS if name == "adamw" else PULLS[2:]:
        found = train(ELEMENTWISE[name], strategy, topology)
        if name == "ftrl":
            # Its powers: TensorFlow computes the last entries of a vector by other instructions
            assert equal([found[0]] * 4, found)
            for mine, theirs in zip(found[0], plain[0], strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-6)
        else:
            assert equal(found, plain), strategy


@pytest.mark.extended
@pytest.mark.parametrize("strategy", [case(Sharded(), kept=False), Sharded("layers")], ids=str)
def test_variables_may_have_no_entries(strategy: Sharded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are alone in a bucket, as those of float64 are: the first step failed."""
    monkeypatch.setitem(SHAPES, "none_kernel", (0, 4))
    monkeypatch.setitem(SHAPES, "none_bias", (0,))
    topology, schemes = Topology(2, 1), {"none*": Scheme("torus"), "*": Scheme()}
    plain = train(adamw, "synchronous", topology, schemes)
    assert equal(train(adamw, strategy, topology, schemes), plain)
    store = train(adamw, strategy, topology, schemes, after=save)[0]
    assert len(store) == 2 + 2 * len(SHAPES) + 1


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(),
        Scheme("pipeline", dense_below=0),
        Scheme("allgather", "exact", 0.2, dense_below=0),
        case(Scheme("torus", wire="float16"), kept=False),
        case(
            {"last*": Scheme("allgather", "mstopk", 0.2, dense_below=0), "*": Scheme()}, kept=False
        ),
    ],
    ids=["dense", "messages", "sparse", "16 bits", "mixed"],
)
def test_every_scheme_may_carry_the_gradients(scheme: object, ranks: int) -> None:
    """With op "sum", which is exact on any number of ranks; unsent entries become residuals."""
    topology = Topology(ranks, 1)
    plain = train(adamw, "synchronous", topology, scheme, "sum")
    assert equal(train(adamw, Sharded("layers"), topology, scheme, "sum"), plain)


@pytest.mark.parametrize("option", [case("clipnorm", kept=False), "global_clipnorm"])
def test_norms_are_those_of_whole_variables(option: str) -> None:
    """A rank has parts of variables alone: equal but for the order of the sums of squares."""
    plain = train(lambda: K.SGD(0.1, **{option: 0.5}), "synchronous", Topology(3, 1))
    clipped = train(lambda: K.SGD(0.1, **{option: 0.5}), Sharded("layers"), Topology(3, 1))
    free = train(lambda: K.SGD(0.1), "synchronous", Topology(3, 1))
    assert equal([clipped[0]] * 3, clipped)
    for mine, theirs, unclipped in zip(clipped[0], plain[0], free[0], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
        assert np.abs(mine - unclipped).max() > 0.01


@pytest.mark.parametrize("entry", [np.inf, 1e30])
def test_an_infinite_norm_is_nan_in_all_weights_as_in_keras(entry: float) -> None:
    """All other weights stood still, and no rank saw why."""

    def work(comm: Comm, strategy: object) -> list[np.ndarray]:
        optimizer = wrap(K.SGD(0.1, global_clipnorm=0.5), comm, strategy, Scheme(), "average")
        weights, (first, *others) = new_weights(), gradients(comm.rank, 0)
        large = first.numpy()
        if comm.rank == 0:
            large[3, 2] = entry
        optimizer.apply([tf.constant(large), *others], weights)
        return [weight.numpy() for weight in weights]

    for strategy in ("synchronous", Sharded("layers")):
        for weights in ThreadComm.run(Topology(2, 1), functools.partial(work, strategy=strategy)):
            assert all(np.isnan(weight).all() for weight in weights)


def test_the_bytes_are_those_of_an_allreduce() -> None:
    """Law 4: (p - 1)/p of the vector pushed, and as much pulled, with the padding of p shards."""

    def sent(optimizer: K.Optimizer, weights: list[keras.Variable]) -> float:
        return optimizer.exchanger.comm.traffic().between

    entries = sum(int(np.prod(shape)) for shape in SHAPES.values())  # 94: padded to 96
    for strategy in (Sharded(), "synchronous"):
        padded = 96 if strategy == Sharded() else entries
        for got in train(lambda: K.SGD(0.1), strategy, Topology(4, 1), steps=3, after=sent):
            assert got == pytest.approx(3 * 2 * 3 / 4 * 4 * padded)


def test_a_rank_keeps_its_part_of_the_state() -> None:
    """Within 5 % of 1/p, and the shard itself."""

    def kept(comm: Comm) -> tuple[int, int]:
        optimizer = wrap(K.Adam(0.01), comm, "sharded", Scheme(), "average")
        weights = [keras.Variable(np.zeros(shape, "float32")) for shape in [(999, 50), (50,), (7,)]]
        optimizer.build(weights)
        state = sum(int(np.prod(one.shape)) * 4 for one in optimizer.variables)
        shards = optimizer.exchanger.sharding.shards.variables
        return state, sum(int(np.prod(one.shape)) * 4 for one in shards)

    entries = 999 * 50 + 50 + 7
    for state, shard in ThreadComm.run(Topology(4, 1), kept):
        assert state <= 1.05 * (2 * 4 * entries / 4)
        assert shard <= 1.05 * (4 * entries / 4)


def plain_state(ranks: int, make: object) -> list[np.ndarray]:
    """Return the synchronous optimizer's variables after four steps."""
    return train(
        make,
        "synchronous",
        Topology(ranks, 1),
        after=lambda opt, _: [v.numpy() for v in opt.variables],
    )[0]


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        *(case(one, kept=False) for one in ("nadam", "average", "accumulation")),
    ],
)
def test_a_file_has_the_whole_state_and_any_number_of_ranks_continues_from_it(name: str) -> None:
    make = ELEMENTWISE[name]
    store = train(make, Sharded("layers"), Topology(4, 1), after=save)[0]
    state = plain_state(4, make)
    assert [store[str(i)].tobytes() for i in range(len(store) - 1)] == [v.tobytes() for v in state]
    # Two ranks of shards against four that have their average
    two = continue_from(store, make, Sharded(), Topology(2, 1), distinct=2)
    four = continue_from(store, make, Sharded("layers"), Topology(4, 1), distinct=2)
    assert equal([two[0]] * 2, two) and equal([four[0]] * 4, four)
    for one, other, before in zip(two[0], four[0], store["weights"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert np.abs(one - before).max() > 1e-3


def test_moving_averages_of_steps_that_accumulate_are_those_of_the_weights() -> None:
    """Shards were zeros until the first update, and entered the moving averages."""

    def work(strategy: object) -> list[list[np.ndarray]]:
        def train_on(comm: Comm) -> list[np.ndarray]:
            plain, weights = averaging(), new_weights()
            for step in range(2):
                plain.apply(gradients(7, step), weights)
            wrapped = wrap(plain, comm, strategy, Scheme(), "average")
            copy_state(wrapped, plain)
            for step in range(3):  # One update, between two steps that accumulate
                wrapped.apply(gradients(comm.rank, step), weights)
            wrapped.finalize_variable_values(weights)
            return [weight.numpy() for weight in weights]

        return ThreadComm.run(Topology(2, 1), train_on)

    def averaging() -> K.Optimizer:
        return K.SGD(0.1, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2)

    assert equal(work("sharded"), work("synchronous"))


def test_an_average_replaces_the_weights_in_a_first_step_that_accumulates() -> None:
    """Shards took it, the weights did not, and the next update began at the old weights."""

    def work(strategy: object) -> list[list[np.ndarray]]:
        def train_on(comm: Comm) -> list[np.ndarray]:
            plain = K.SGD(
                0.1,
                use_ema=True,
                ema_momentum=0.5,
                ema_overwrite_frequency=3,
                gradient_accumulation_steps=2,
            )
            weights = new_weights()
            for step in range(4):
                plain.apply(gradients(7, step), weights)
            wrapped = wrap(plain, comm, strategy, Scheme(), "average")
            copy_state(wrapped, plain)
            for step in range(2):
                wrapped.apply(gradients(comm.rank, step), weights)
            return [weight.numpy() for weight in weights]

        return ThreadComm.run(Topology(1, 1), train_on)

    assert equal(work("sharded"), work("synchronous"))


@pytest.mark.extended
def test_swapped_moving_averages_are_in_the_weights() -> None:
    """Keras's callback swapped the shards alone: evaluations and files had the usual weights."""

    def swap(optimizer: K.Optimizer, weights: list[keras.Variable]) -> list[np.ndarray]:
        callback = keras.callbacks.SwapEMAWeights()
        callback.set_model(SimpleNamespace(optimizer=optimizer))
        usual = [weight.numpy() for weight in weights]
        callback.on_test_begin()
        averages = [weight.numpy() for weight in weights]
        assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(usual, averages, strict=True))
        callback.on_test_end()
        for weight, before in zip(weights, usual, strict=True):
            np.testing.assert_allclose(weight, before, atol=1e-6)
        return averages

    def averages_of(strategy: object) -> list[list[np.ndarray]]:
        make = functools.partial(K.SGD, 0.1, use_ema=True, ema_momentum=0.5)
        return train(make, strategy, Topology(2, 1), after=swap)

    for own, others in zip(averages_of("sharded"), averages_of("synchronous"), strict=True):
        for average, other in zip(own, others, strict=True):
            np.testing.assert_allclose(average, other, atol=1e-6)


def test_tensorflows_checkpoint_is_restored_by_the_rank_that_wrote_it(tmp_path: Path) -> None:
    """Other ranks took rank 0's shards for theirs."""

    def work(comm: Comm) -> None:
        wrapped = [
            wrap(K.SGD(0.1, momentum=0.9), comm, "sharded", Scheme(), "average") for _ in range(2)
        ]
        for optimizer in wrapped:
            optimizer.build(new_weights())
        wrapped[0].apply(gradients(comm.rank, 0))
        paths = comm.gather_objects(
            tf.train.Checkpoint(optimizer=wrapped[0]).write(str(tmp_path / f"rank{comm.rank}"))
        )
        again = tf.train.Checkpoint(optimizer=wrapped[1])
        again.read(paths[comm.rank]).assert_existing_objects_matched()
        for variable, saved in zip(wrapped[1].variables, wrapped[0].variables, strict=True):
            np.testing.assert_array_equal(variable, saved)
        with pytest.raises(CheckpointError, match=rf"rank {1 - comm.rank} of 2\b"):
            again.read(paths[1 - comm.rank])

    ThreadComm.run(Topology(2, 1), work)


def test_an_optimizer_that_has_state_keeps_it_when_it_is_wrapped() -> None:
    """And a copy of it, as copy and pickle make it, is the plain one."""

    def work(strategy: object) -> list[list[np.ndarray]]:
        def go(comm: Comm) -> list[np.ndarray]:
            plain, weights = adamw(), new_weights()
            plain.apply(gradients(7, 7), weights)
            wrapped = wrap(plain, comm, strategy, Scheme(), "average")
            copy_state(wrapped, plain)
            assert type(plain_copy(wrapped)) is K.AdamW and int(wrapped.iterations) == 1
            for step in range(2):
                wrapped.apply(gradients(comm.rank, step), weights)
            return [one.numpy() for one in weights]

        return ThreadComm.run(Topology(2, 1), go)

    assert equal(work(Sharded("layers")), work("synchronous"))


def test_state_that_was_not_gathered_is_not_written() -> None:
    def save(optimizer: K.Optimizer, _: object) -> str:
        consolidate(optimizer)
        optimizer.apply(gradients(optimizer.exchanger.comm.rank, 9))
        with pytest.raises(ConfigurationError) as refused:
            optimizer.save_own_variables({})
        return str(refused.value)

    for said in train(lambda: K.Adam(0.1), "sharded", Topology(2, 1), after=save):
        assert re.search(r"step 5\b.*cx\.consolidate\(optimizer\)", said)


def test_steps_that_begin_with_the_pull_are_equal_and_settle() -> None:
    """Between them the weights are one update old; `consolidate` brings them up to date."""

    def work(comm: Comm) -> tuple[list[bytes], list[bytes], list[bytes]]:
        strategy = Sharded("layers")
        optimizer, weights = wrap(adamw(), comm, strategy, Scheme(), "average"), new_weights()
        optimizer.build(weights)
        run = optimizer.exchanger.run_for(weights)
        seen = []
        for step in range(4):
            run.begin([tf.zeros([])])
            seen.append([one.numpy().tobytes() for one in weights])
            optimizer.apply(gradients(comm.rank, step), weights)
        old = [one.numpy().tobytes() for one in weights]
        assert old == seen[-1]
        consolidate(optimizer)
        new = [one.numpy().tobytes() for one in weights]
        weights[0].assign(weights[0] + 1)  # Somebody sets weights between steps: they count
        run.begin([tf.zeros([])])
        assert weights[0].numpy().tobytes() != new[0]
        return seen[-1], new, [one.numpy().tobytes() for one in weights]

    topology = Topology(2, 1)
    three, four = (
        [one.tobytes() for one in train(adamw, "synchronous", topology, steps=steps)[0]]
        for steps in (3, 4)
    )
    results = ThreadComm.run(topology, work)
    assert all(result[:2] == (three, four) for result in results)
    assert results[0][2] == results[1][2]


@pytest.mark.extended
def test_a_change_of_scheme_keeps_the_shards() -> None:
    """Dense, then sparse with other buckets: as synchronous training under the same change."""
    sparse = Scheme("allgather", "exact", 0.3, dense_below=0, bucket_bytes=64)

    def work(strategy: object) -> list[list[np.ndarray]]:
        def go(comm: Comm) -> list[np.ndarray]:
            optimizer, weights = wrap(adamw(), comm, strategy, Scheme(), "average"), new_weights()
            for step in range(4):
                if step == 2:
                    optimizer.exchanger.switch(sparse)
                optimizer.apply(gradients(comm.rank, step), weights)
            return [one.numpy() for one in weights]

        return ThreadComm.run(Topology(2, 1), go)

    assert equal(work(Sharded("layers")), work("synchronous"))


class OwnSGD(K.SGD):
    """A user's optimizer, whose update may read whole variables."""


def test_optimizers_that_nobody_knows_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"\bOwnSGD\b"):
        require_shardable(OwnSGD(learning_rate=0.1))


def test_a_step_of_some_variables_is_refused() -> None:
    def work(comm: Comm) -> None:
        optimizer, weights = wrap(K.SGD(0.1), comm, "sharded", Scheme(), "average"), new_weights()
        optimizer.build(weights)
        with pytest.raises(PlanError, match="'first_kernel'"):
            optimizer.apply(gradients(0, 0)[1:], weights[1:])

    ThreadComm.run(Topology(2, 1), work)


def test_ranks_that_cut_differently_are_refused() -> None:
    def work(comm: Comm) -> None:
        make = K.SGD(0.1, weight_decay=0.1)
        if comm.rank:
            make.exclude_from_weight_decay(var_names=["bias"])
        optimizer, weights = wrap(make, comm, "sharded", Scheme(), "average"), new_weights()
        with pytest.raises(PlanError, match=r"[Rr]ank 0\b.*\b1\b.*rank 1\b.*\b2\b"):
            optimizer.apply(gradients(0, 0), weights)

    ThreadComm.run(Topology(2, 1), work)


def test_batches_need_times_of_this_model() -> None:
    with pytest.raises(PlanError, match=r"pull='batched'.*profile=None"):
        Sharded("batched")
    with pytest.raises(PlanError, match=r"pull='layers'.*profile="):
        Sharded("layers", PROFILE)
    other = Profile("other", PROFILE.variables[1:], 4.0, 2.0, batch=1)
    sizes = Profile.of_sizes("sizes", PROFILE.variables)
    for profile, named in ((other, r"'other'.*\(9,\)"), (sizes, "'sizes'")):
        with pytest.raises(PlanError, match=named):
            train(lambda: K.SGD(0.1), Sharded("batched", profile), Topology(2, 1))


def test_bfloat16_is_refused() -> None:
    plan = make_plan([Gradient("a", (4,), "bfloat16")], {"*": Scheme()}, Topology(2, 1))
    with pytest.raises(PlanError, match=r"\bbfloat16\b.*'a'"):
        lay_out(plan, ["a"], ["bfloat16"], [False], [(0, 1)], 2)


def test_a_state_from_before_a_step_is_not_shared() -> None:
    """A state that was loaded long ago replaced the momenta at the beginning of a `fit`."""

    def work(comm: Comm) -> bool:
        optimizer, weights = wrap(momentum(), comm, "sharded", Scheme(), "average"), new_weights()
        plain = momentum()
        plain.build(weights)
        copy_state(optimizer, plain)
        sharding = optimizer.exchanger.sharding
        optimizer.apply(gradients(comm.rank, 0), weights)
        before = [shard.numpy() for shard in sharding.state]
        sharding.share_loaded(0, steps_of(optimizer))
        after = [shard.numpy() for shard in sharding.state]
        return any(map(np.any, before)) and all(map(np.array_equal, before, after))

    assert ThreadComm.run(Topology(2, 1), work) == [True, True]


def test_a_pull_is_cut_where_an_all_gather_counts_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step was refused, and the remedy that the error named changed no pull."""
    topology, scheme = Topology(2, 1), Scheme(bucket_bytes=64)
    plain = train(momentum, "synchronous", topology, scheme)
    monkeypatch.setattr(comm_module, "LARGEST_COUNT", 60)  # Below all 94, above the largest bucket
    assert equal(train(momentum, Sharded(), topology, scheme), plain)
    with pytest.raises(PlanError, match=r"\b30\b.*\b2\b.*\b49\b.*float32.*synchronous"):
        train(lambda: K.Lamb(0.1), Sharded(), topology, scheme)


def test_a_loaded_state_reaches_all_ranks_with_its_dtypes_and_shapes() -> None:
    """Also scalars: exchanged as an object, one of NumPy became a number without a dtype."""
    state = {"m": [np.arange(3, dtype="int64"), None], "v": [None, np.float64(1 / 3)]}

    def work(comm: Comm) -> dict[str, dict[str, np.ndarray]]:
        received: dict[str, dict[str, np.ndarray]] = {}
        shards = SimpleNamespace(
            weights={"a": None, "b": None}, set_slots=lambda slots, whole: received.update(whole)
        )
        sharding = Sharding([], shards, comm, "world")
        if comm.rank == 1:
            sharding.load_state(state, 7)
        sharding.share_loaded(1, 7)
        return received

    for whole in ThreadComm.run(Topology(3, 1), work):
        assert whole["m"]["a"].dtype == "int64" and whole["m"]["a"].tolist() == [0, 1, 2]
        assert whole["v"]["b"].dtype == "float64" and whole["v"]["b"] == 1 / 3
