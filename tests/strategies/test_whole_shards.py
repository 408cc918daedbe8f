"""Shards of whole variables: LARS, LAMB, Lamb, Adafactor and Muon as in synchronous training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from threaded_optimizers import (
    DENSE,
    SHAPES,
    continue_from,
    equal,
    gradients,
    new_weights,
    save,
    train,
    wrap,
)

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import PlanError, Scheme, Topology
from tfcommx.keras_internals.shards import require_shardable
from tfcommx.optim.step_boundary import consolidate
from tfcommx.optimizers.lamb import LAMB
from tfcommx.optimizers.lars import LARS
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.strategies import Sharded
from tfcommx.strategies.sharded.shards import Shards
from tfcommx.strategies.sharded.whole_shards import WholeShards, lay_out_whole

K = keras.optimizers


def muon() -> K.Optimizer:
    optimizer = K.Muon(0.01, weight_decay=0.1, adam_weight_decay=0.2, exclude_layers=["last_k"])
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "lars": lambda: LARS(1.0, weight_decay=0.01, nesterov=True),
    "lamb": lambda: LAMB(0.01, weight_decay=0.01),
    "keras_lamb": lambda: K.Lamb(0.01, weight_decay=0.01),
    "adafactor": lambda: K.Adafactor(0.05),
    "muon": muon,
    "muon_ema": lambda: K.Muon(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulating": lambda: LARS(1.0, gradient_accumulation_steps=2),
}


EXHAUSTIVE = ("keras_lamb", "muon_ema", "accumulating")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.exhaustive if one in EXHAUSTIVE else ())
        for one in OPTIMIZERS
    ],
)
def test_whole_variables_equal_synchronous_training_to_the_bit(name: str) -> None:
    """Laws 1 and 3, on four ranks with a variable each; and files that others continue from."""
    make = OPTIMIZERS[name]
    require_shardable(make())

    def look(
        optimizer: K.Optimizer, weights: list[keras.Variable]
    ) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, np.ndarray]]:
        mine = [one.numpy() for one in weights]
        state = [one.numpy() for one in optimizer.variables]
        store = save(optimizer, weights) if optimizer.exchanger.sharding else {}
        return mine, state, store

    plain = train(make, "synchronous", Topology(2, 2), after=look)
    found = train(make, "sharded", Topology(2, 2), after=look)
    assert equal([one[0] for one in found], [one[0] for one in plain])
    for old, new in zip(new_weights(), plain[0][0], strict=True):
        assert np.abs(old.numpy() - new).max() > 1e-4
    store = found[0][2]
    assert [store[str(i)].tobytes() for i in range(len(store) - 1)] == [
        one.tobytes() for one in plain[0][1]
    ]
    two = continue_from(store, make, Sharded(group="node"), Topology(1, 2), distinct=2)
    assert equal([two[0]] * 2, two)
    for one, before in zip(two[0], store["weights"], strict=True):
        assert np.abs(one - before).max() > 1e-4


@pytest.mark.parametrize(
    "name", ["lamb", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in OPTIMIZERS)]
)
def test_every_scheme_may_carry_their_gradients(name: str) -> None:
    """Three ranks, of which one has two variables; some travel sparse."""
    sparse = Scheme("allgather", "exact", 0.2, dense_below=10, bucket_bytes=160)
    plain = train(OPTIMIZERS[name], "synchronous", Topology(3, 1), sparse, "sum")
    assert equal(train(OPTIMIZERS[name], "sharded", Topology(3, 1), sparse, "sum"), plain)


@pytest.mark.parametrize("option", [case("clipnorm", kept=False), "global_clipnorm"])
def test_norms_are_those_of_all_variables(option: str) -> None:
    make = lambda: LARS(1.0, **{option: 0.5})  # noqa: E731
    plain = train(make, "synchronous", Topology(3, 1))
    clipped = train(make, "sharded", Topology(3, 1))
    assert equal([clipped[0]] * 3, clipped)
    for mine, theirs in zip(clipped[0], plain[0], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("name", ["lamb", case("adafactor", kept=False), "muon"])
def test_a_rank_keeps_the_state_of_its_variables_alone(name: str) -> None:
    """Of sizes that can be balanced, within 5 % of a quarter of the synchronous optimizer's."""
    shapes = [(60, 40), (40, 60), (30, 80), (50, 48), *[(7,)] * 8]

    def kept(comm: Comm) -> tuple[int, int]:
        found = []
        for strategy in ("synchronous", "sharded"):
            optimizer = wrap(OPTIMIZERS[name](), comm, strategy, Scheme(), "average")
            weights = [
                keras.Variable(np.ones(shape, "float32"), name=f"v{place}")
                for place, shape in enumerate(shapes)
            ]
            optimizer.build(weights)
            arrays = [one.numpy() for one in optimizer.variables]
            found.append(sum(array.nbytes for array in arrays if array.ndim))
        return tuple(found)

    for whole, mine in ThreadComm.run(Topology(4, 1), kept):
        assert 0 < mine <= 1.05 * whole / 4


def test_optimizers_see_the_paths_of_the_variables() -> None:
    """By which LARS leaves out biases: of a layer in a layer, on every rank."""

    def work(strategy: str) -> list[list[np.ndarray]]:
        def go(comm: Comm) -> list[np.ndarray]:
            with keras.name_scope("model"), keras.name_scope("layer"):
                weights = [
                    keras.Variable(np.ones(shape, "float32"), name=path.partition("/")[2])
                    for path, shape in SHAPES.items()
                ]
            make = LARS(1.0, exclude=["model/layer/bias"])
            optimizer = wrap(make, comm, strategy, Scheme(), "average")
            optimizer.apply(gradients(comm.rank, 0), weights)
            return [one.numpy() for one in weights]

        return ThreadComm.run(Topology(2, 1), go)

    assert equal(work("sharded"), work("synchronous"))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("lars", lambda: LARS(1.0, exclude=["first_*", "last_bias"])),
        ("muon", lambda: K.Muon(0.01, weight_decay=0.1, exclude_layers=["^first_k"])),
    ],
)
def test_patterns_from_the_beginning_of_a_path_mean_variables_without_a_scope_too(
    name: str, make: Callable[[], K.Optimizer]
) -> None:
    """Also where the shards are made in a scope, as a model's call has one."""

    def paths(comm: Comm) -> list[tuple[str, str]]:
        optimizer, weights = wrap(make(), comm, "sharded", Scheme(), "average"), new_weights()
        with keras.name_scope("around"):
            optimizer.build(weights)
        shards = optimizer.exchanger.sharding.shards
        return list(zip(shards.names, [one.path for one in shards.variables], strict=True))

    found = ThreadComm.run(Topology(2, 1), paths)
    assert sorted([*found[0], *found[1]]) == sorted((one.path, one.path) for one in new_weights())
    plain = train(make, "synchronous", Topology(2, 1))
    assert equal(train(make, "sharded", Topology(2, 1)), plain)


@pytest.mark.parametrize("make", [OPTIMIZERS["lamb"], lambda: K.Adam(0.1)])
def test_state_is_gathered_again_only_if_it_has_changed(
    make: Callable[[], K.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an epoch's end it is asked for twice; a rank alone may load or set another in between."""
    gathered: list[str] = []
    for cls in (Shards, WholeShards):
        plain = cls.gather

        def gather(self: Shards, *rest: Any, plain: Any = plain) -> Any:
            gathered.append("once")
            return plain(self, *rest)

        monkeypatch.setattr(cls, "gather", gather)

    def consolidated(optimizer: K.Optimizer) -> int:
        comm = optimizer.exchanger.comm
        consolidate(optimizer)
        return max(comm.gather_objects(len(gathered)))

    def work(comm: Comm) -> list[int]:
        optimizer, weights = wrap(make(), comm, "sharded", DENSE, "average"), new_weights()
        optimizer.apply(gradients(comm.rank, 0), weights)
        counts = [consolidated(optimizer), consolidated(optimizer)]
        store: dict[str, np.ndarray] = {}
        if comm.rank == 0:
            optimizer.save_own_variables(store)
            doubled = {key: value * (1 if value.ndim == 0 else 2) for key, value in store.items()}
            optimizer.load_own_variables(doubled)
        counts.append(consolidated(optimizer))
        if comm.rank == 1:
            state = optimizer.exchanger.sharding.state[0]
            state.assign(state + 1)
        counts.append(consolidated(optimizer))
        optimizer.apply(gradients(comm.rank, 1), weights)
        counts.append(consolidated(optimizer))
        return counts

    assert ThreadComm.run(Topology(2, 1), work) == [[2, 2, 4, 6, 8]] * 2


def test_an_optimizer_without_state_is_saved_after_each_step() -> None:
    """Its state is empty, so gathering finds no change; only the number of steps differs."""

    def work(comm: Comm) -> list[int]:
        optimizer, weights = wrap(K.SGD(0.1), comm, "sharded", DENSE, "average"), new_weights()
        found = []
        for step in range(2):
            optimizer.apply(gradients(comm.rank, step), weights)
            store = save(optimizer, weights)
            found += [int(store["0"])] if store else []
        return found

    assert ThreadComm.run(Topology(2, 1), work) == [[1, 2], []]


def test_the_state_of_a_variable_without_entries_is_saved() -> None:
    """No rank has it in its shard: rank 0's save ended with a KeyError, and the others waited."""

    def work(comm: Comm) -> list[tuple[int, ...]]:
        optimizer = wrap(LAMB(0.01), comm, "sharded", Scheme(), "average")
        weights = [keras.Variable(np.ones(shape, "float32")) for shape in ((6, 4), (3,), (0, 4))]
        optimizer.build(weights)
        optimizer.apply([tf.ones(weight.shape) for weight in weights], weights)
        consolidate(optimizer)
        store: dict[str, np.ndarray] = {}
        if comm.rank == 0:
            optimizer.save_own_variables(store)
        return [np.shape(value) for value in store.values()]

    shapes = ThreadComm.run(Topology(2, 1), work)[0]
    assert shapes == [(), (), (6, 4), (6, 4), (3,), (3,), (0, 4), (0, 4)]


def test_the_vectors_hold_each_ranks_variables_side_by_side() -> None:
    sizes = {"a": 6, "b": 4, "c": 3, "d": 1}
    found = [Gradient(path, (size,), "float32") for path, size in sizes.items()]
    plan = make_plan(found, {"*": Scheme(bucket_bytes=28)}, Topology(2, 1))
    weights = {path: tf.Variable(tf.zeros([size])) for path, size in sizes.items()}
    (pull,), pushes = lay_out_whole(plan, weights, [True] * 4, 2)
    assert (pull.paths, pull.starts, pull.length) == (("a", "d", "b", "c"), (0, 6, 7, 11), 7)
    assert [set(one.paths) for one in pushes] == [set(one.variables) for one in plan.buckets]
    tensors = {path: tf.fill([size], float(size)) for path, size in sizes.items()}
    flat = pull.flatten(tensors, "float32")
    assert flat.numpy().tolist() == [6.0] * 6 + [1.0] + [4.0] * 4 + [3.0] * 3
    shapes = {path: one.shape for path, one in weights.items()}
    assert {path: one.numpy().tolist() for path, one in pull.unflatten(flat, shapes).items()} == {
        path: [float(size)] * size for path, size in sizes.items()
    }


@pytest.mark.parametrize(
    ("strategy", "ranks", "received"),
    [
        (Sharded("layers"), 2, "pull='layers'"),
        (Sharded(), 5, r"\b4\b.*\b5\b"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    strategy: Sharded, ranks: int, received: str
) -> None:
    def work(comm: Comm) -> None:
        optimizer = wrap(K.Muon(0.1), comm, strategy, Scheme(), "average")
        with pytest.raises(PlanError, match=received):
            optimizer.build(new_weights())

    ThreadComm.run(Topology(ranks, 1), work)
