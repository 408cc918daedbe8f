"""Weight averaging with an outer optimizer, and in fragments: against a definition in NumPy."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case, drawn
from threaded_optimizers import DENSE, SHAPES, gradients, new_weights, train, wrap

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, PlanError, Scheme, Topology
from tfcommx.optim.step_boundary import consolidate
from tfcommx.planner.plan import Gradient, fragment_of, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies import WeightAveraging
from tfcommx.strategies.averaging.outer_optimizer import OuterOptimizer, StartWeights

K = keras.optimizers
TWO = Topology(2, 1)
SPARSE = Scheme("hitopk", "exact", 0.2, dense_below=0)
COMPRESSED = Scheme("torus", compression="powersgd/1", dense_below=0)
RATE, MOMENTUM = 0.7, 0.9


def outer() -> K.Optimizer:
    """The outer optimizer of the paper."""
    return K.SGD(RATE, momentum=MOMENTUM, nesterov=True)


def sgd() -> K.Optimizer:
    return K.SGD(0.1)


def close(one: Sequence[np.ndarray], other: Sequence[np.ndarray], atol: float = 3e-6) -> None:
    for mine, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, expected, atol=atol)


def same(everyone: list[list[np.ndarray]]) -> bool:
    return all(
        np.array_equal(mine, first)
        for weights in everyone
        for mine, first in zip(weights, everyone[0], strict=True)
    )


def consolidated(optimizer: K.Optimizer, weights: list[keras.Variable]) -> list[np.ndarray]:
    consolidate(optimizer)
    return [one.numpy() for one in weights]


def diloco(
    ranks: int, every: int, steps: int, fragments: int = 1, overlap: int = 0
) -> list[list[np.ndarray]]:
    """Algorithm 1 with SGD inside and Nesterov momentum outside; each rank's weights at the end.

    The gradients here do not depend on the weights. A round's average moves the weights `overlap`
    steps later.
    """
    start = [one.numpy().astype(np.float64) for one in new_weights()]
    mine = [[one.copy() for one in start] for _ in range(ranks)]
    velocity = [np.zeros_like(one) for one in start]
    sizes = {one.path: one.numpy().size for one in new_weights()}
    place = list(fragment_of(sizes, fragments)[path] for path in sizes)
    sent = [[one.copy() for one in start] for _ in range(ranks)]
    for step in range(1, steps + 1):
        for rank in range(ranks):
            for weight, gradient in zip(mine[rank], gradients(rank, step - 1), strict=True):
                weight -= 0.1 * gradient.numpy()

        def due(number: int, at: int) -> bool:
            return at > 0 and (at - (place[number] + 1) * every // fragments) % every == 0

        # Rounds that end come before those that begin
        for number in range(len(place)) if overlap else ():
            if due(number, step - overlap):
                end_round(start, mine, sent, velocity, number)
        for number in range(len(place)):
            if due(number, step):
                for rank in range(ranks):
                    sent[rank][number] = mine[rank][number].copy()
                if not overlap:
                    end_round(start, mine, sent, velocity, number)
    return mine


def end_round(
    start: list[np.ndarray],
    mine: list[list[np.ndarray]],
    sent: list[list[np.ndarray]],
    velocity: list[np.ndarray],
    number: int,
) -> None:
    """Move the start weights of a variable; each rank continues from them."""
    outer_gradient = np.mean([start[number] - one[number] for one in sent], axis=0)
    velocity[number] = MOMENTUM * velocity[number] - RATE * outer_gradient
    start[number] = start[number] + MOMENTUM * velocity[number] - RATE * outer_gradient
    for one, before in zip(mine, sent, strict=True):
        one[number] = start[number] + (one[number] - before[number])


@pytest.mark.parametrize(
    ("every", "fragments", "overlap"),
    [
        case(1, 1, 0, kept=False),
        (3, 1, 0),
        (4, 2, 0),
        case(4, 4, 0, kept=False),
        (1, 1, 1),
        case(3, 1, 2, kept=False),
        case(4, 1, 4, kept=False),
        (4, 2, 2),
    ],
)
def test_it_is_the_definition(every: int, fragments: int, overlap: int) -> None:
    """After 9 steps: for every=4 in the middle of a round, when ranks differ."""
    strategy = WeightAveraging(every, outer=outer(), fragments=fragments, overlap=overlap)
    found = train(sgd, strategy, TWO, steps=9)
    for mine, expected in zip(found, diloco(2, every, 9, fragments, overlap), strict=True):
        close(mine, expected)
    assert same(found) == (fragments == 1 and every != 4 and not overlap)


@pytest.mark.parametrize(("steps", "sends"), drawn([4, 5, 6], ["weights", "updates"]))
def test_rounds_that_overlap_average_what_others_do(sends: str, steps: int) -> None:
    """At the end of a round's first step, under way, and after it; every update is sent once.

    Gradients here do not depend on the weights: the sums are the same, in another order.
    """
    plain = train(sgd, WeightAveraging(4, sends), TWO, steps=steps, after=consolidated)
    strategy = WeightAveraging(4, sends, fragments=2, overlap=1)
    found = train(sgd, strategy, TWO, steps=steps, after=consolidated)
    assert same(found)
    close(found[0], plain[0])


def test_another_optimizer_takes_what_a_round_under_way_has_not_sent() -> None:
    """Residuals are read after the round: its result plus the residuals equal the dense average.

    The first optimizer may continue later.
    """

    def work(comm: Comm) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        strategy = WeightAveraging(3, outer=K.SGD(1.0), overlap=3)
        optimizer, weights = wrap(sgd(), comm, strategy, SPARSE, "average"), new_weights()
        for step in range(3):
            optimizer.apply(gradients(comm.rank, step), weights)
        (run,) = optimizer.exchanger.runs.values()
        exchanger = optimizer.exchanger
        kept = exchanger.hand_over(weights, exchanger.names).residuals
        assert not exchanger.hand_over(weights, exchanger.names).residuals
        starts = [run._starts[one.path].numpy() for one in weights]
        for step in range(3, 8):
            optimizer.apply(gradients(comm.rank, step), weights)
        return starts, kept

    ranks = ThreadComm.run(TWO, work)
    dense = train(sgd, WeightAveraging(3), TWO, steps=3)[0]
    for place, one in enumerate(new_weights()):
        kept = [residuals[one.path] for _, residuals in ranks if one.path in residuals]
        unsent = np.reshape(sum(kept) / 2, one.shape) if kept else 0.0
        np.testing.assert_allclose(ranks[0][0][place] + unsent, dense[place], atol=1e-5)


def test_what_a_round_raises_reaches_the_step_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("the network is gone")

    monkeypatch.setattr(PlanExecutor, "exchange", fail)

    def work(comm: Comm) -> int:
        optimizer, weights = (
            wrap(sgd(), comm, WeightAveraging(4, overlap=2), DENSE, "average"),
            new_weights(),
        )
        for step in range(5):
            optimizer.apply(gradients(comm.rank, step), weights)
        with pytest.raises(ValueError, match="network"):
            optimizer.apply(gradients(comm.rank, 5), weights)
        return comm.rank

    assert ThreadComm.run(TWO, work) == [0, 1]


def test_a_rate_of_one_is_plain_averaging() -> None:
    plain = train(sgd, WeightAveraging(3), TWO, steps=8, after=consolidated)
    for fragments in (1, 3):
        strategy = WeightAveraging(3, outer=K.SGD(1.0), fragments=fragments)
        found = train(sgd, strategy, TWO, steps=8, after=consolidated)
        assert same(found)
        close(found[0], plain[0])


@pytest.mark.parametrize("sends", ["weights", "updates"])
def test_fragments_average_what_the_whole_does(sends: str) -> None:
    """Gradients here do not depend on the weights: the sums are the same, in another order."""
    whole = train(sgd, WeightAveraging(4, sends), TWO, steps=7, after=consolidated)
    strategy = WeightAveraging(4, sends, fragments=4)
    found = train(sgd, strategy, TWO, steps=7, after=consolidated)
    assert same(found)
    close(found[0], whole[0])


@pytest.mark.parametrize(
    ("scheme", "fragments", "overlap"),
    [(SPARSE, 1, 0), (SPARSE, 2, 0), (SPARSE, 1, 4), (SPARSE, 2, 1), (COMPRESSED, 1, 4)],
)
def test_updates_conserve_what_was_not_sent(scheme: Scheme, fragments: int, overlap: int) -> None:
    """Law 2: the movement of the start weights plus the mean residual equals all updates."""

    def after(optimizer: K.Optimizer, weights: list[keras.Variable]) -> tuple[Any, Any]:
        found = consolidated(optimizer, weights)
        return found, optimizer.exchanger.export().residuals

    options = {"outer": K.SGD(1.0), "fragments": fragments, "overlap": overlap}
    ranks = train(sgd, WeightAveraging(4, **options), TWO, scheme, steps=7, after=after)
    dense = train(sgd, WeightAveraging(4), TWO, steps=7, after=consolidated)
    assert same([weights for weights, _ in ranks])
    for place, one in enumerate(new_weights()):
        kept = [residuals[one.path] for _, residuals in ranks if one.path in residuals]
        unsent = np.reshape(sum(kept) / 2, one.shape) if kept else 0.0
        assert not kept or np.abs(unsent).max() > 1e-3
        np.testing.assert_allclose(ranks[0][0][place] + unsent, dense[0][place], atol=1e-5)


def test_a_nan_reaches_all_ranks_and_no_residual() -> None:
    def work(comm: Comm) -> tuple[list[bool], bool]:
        strategy = WeightAveraging(2, outer=outer(), fragments=2)
        optimizer, weights = wrap(sgd(), comm, strategy, SPARSE, "average"), new_weights()
        for step in range(2):
            mine = gradients(comm.rank, step)
            if comm.rank == 1:
                mine[0] = tf.fill(mine[0].shape, np.nan)
            optimizer.apply(mine, weights)
        kept = optimizer.exchanger.export().residuals.values()
        nan = [bool(np.isnan(one.numpy()).any()) for one in weights]
        return nan, all(np.isfinite(part).all() for part in kept)

    assert ThreadComm.run(TWO, work) == [([True, False, False, False], True)] * 2


def test_no_step_sends_everything_and_bytes_count_steps() -> None:
    """Also a round that ends early counts the steps that were taken, and no more."""

    def work(comm: Comm) -> tuple[list[float], list[float]]:
        strategy = WeightAveraging(4, outer=outer(), fragments=2)
        optimizer, weights = wrap(sgd(), comm, strategy, Scheme(), "average"), new_weights()
        sent, dense = [0.0], [0.0]
        for step in range(6):
            optimizer.apply(gradients(comm.rank, step), weights)
            if step == 4:
                consolidate(optimizer)
            traffic = optimizer.exchanger.traffic()
            sent.append(traffic["bytes_between_nodes"])
            dense.append(traffic["bytes_between_nodes_dense"])
        return np.diff(sent).tolist(), np.diff(dense).tolist()

    whole = 4.0 * sum(np.prod(shape) for shape in SHAPES.values())
    for sent, dense in ThreadComm.run(TWO, work):
        # The one step since its round sends the second fragment again, and the first, at the end
        assert [not one for one in sent] == [True, False, True, False, False, True]
        assert sent[1] + sent[3] == whole and abs(sent[1] - sent[3]) < whole / 4
        assert dense == [whole] * 6


def test_the_state_of_the_outer_optimizer_survives_a_change_of_scheme() -> None:
    def work(comm: Comm, changes: bool) -> list[np.ndarray]:
        strategy = WeightAveraging(2, outer=outer())
        optimizer, weights = wrap(sgd(), comm, strategy, Scheme(), "average"), new_weights()
        for step in range(6):
            if changes and step in (2, 4):
                optimizer.exchanger.switch(Scheme(bucket_bytes=64))
            optimizer.apply(gradients(comm.rank, step), weights)
        return [one.numpy() for one in weights]

    changed, plain = (
        ThreadComm.run(TWO, lambda comm, changes=changes: work(comm, changes))
        for changes in (True, False)
    )
    assert same(changed + plain)


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 0), (1, 1)])
def test_a_round_begins_at_weights_that_replace_those_of_an_epochs_end(
    fragments: int, overlap: int
) -> None:
    """As after EarlyStopping's best weights: the next round leaves the discarded ones alone."""

    def work(comm: Comm) -> list[np.ndarray]:
        strategy = WeightAveraging(2, outer=K.SGD(0.7), fragments=fragments, overlap=overlap)
        optimizer, weights = wrap(sgd(), comm, strategy, DENSE, "average"), new_weights()
        for step in range(3):
            optimizer.apply(gradients(comm.rank, step), weights)
        consolidate(optimizer)
        for weight, restored in zip(weights, new_weights(), strict=True):
            weight.assign(restored)
        for _ in range(3):
            optimizer.apply([tf.zeros(shape) for shape in SHAPES.values()], weights)
        return consolidated(optimizer, weights)

    for weights in ThreadComm.run(TWO, work):
        close(weights, [weight.numpy() for weight in new_weights()])


def test_another_rate_keeps_the_state_and_another_class_begins_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = {"v": tf.Variable([0.0]), "w": tf.Variable([1.0, 2.0])}
    first = StartWeights(start, OuterOptimizer.of(K.SGD(0.5, momentum=0.5)), {})
    first.move("w", tf.constant([1.0, 1.0]))
    state = first.state()
    for optimizer, moved in (
        # Velocity: .5 x .5 of before; the start weights of the second are 0
        (K.SGD(0.25, momentum=0.5), 0.5 * 0.5 + 0.25),
        # As many variables as SGD with momentum has
        (K.RMSprop(0.25, rho=0.75), 0.5),
    ):
        second = StartWeights(start, OuterOptimizer.of(optimizer), state)
        np.testing.assert_allclose(second.move("w", tf.constant([1.0, 1.0])), moved, rtol=1e-5)
    assert [one.getMessage() for one in caplog.records] == [
        "The outer optimizer was SGD and is now RMSprop: its state begins anew."
    ]


def test_ranks_must_have_equal_outer_optimizers() -> None:
    """Keras numbers the names of optimizers, which may differ; their settings may not."""
    named = [WeightAveraging(2, outer=K.SGD(0.7, name=name)) for name in ("one", "two")]
    assert repr(named[0]) == repr(named[1])
    assert OuterOptimizer.of(outer()).make().get_config()["nesterov"]

    def work(comm: Comm) -> str:
        strategy = WeightAveraging(2, outer=K.SGD(0.7 + 0.1 * comm.rank))
        optimizer = wrap(sgd(), comm, strategy, Scheme(), "average")
        with pytest.raises(
            PlanError, match=r"learning_rate=0\.7\b.*rank 1\b.*learning_rate=0\.8"
        ) as refused:
            optimizer.apply(gradients(comm.rank, 0), new_weights())
        return str(refused.value)

    assert "outer=SGD(learning_rate=0.8" in ThreadComm.run(TWO, work)[0]


def test_what_cannot_be_is_refused() -> None:
    for outer_optimizer, received in (
        ("sgd", "'sgd'"),
        (K.LossScaleOptimizer(K.SGD()), "LossScaleOptimizer"),
        (K.SGD(global_clipnorm=1.0), "global_clipnorm=1.0"),
        (K.SGD(use_ema=True), "use_ema=True"),
        (K.AdamW(), "weight_decay=0.004"),
    ):
        with pytest.raises(ConfigurationError, match=received):
            WeightAveraging(2, outer=outer_optimizer)
    for options, received in (
        ({"fragments": 0}, r"`fragments`.*\b0\b"),
        ({"fragments": 3}, "fragments=3 .*every=2"),
        ({"fragments": 2, "momentum": "reset"}, "momentum='reset' .*fragments=2"),
        ({"overlap": 1, "momentum": "reset"}, "momentum='reset' .*overlap=1"),
        ({"overlap": -1}, "`overlap`.*-1"),
        ({"overlap": 2, "fragments": 2}, "overlap=2 .*fragments=2"),
    ):
        with pytest.raises(ConfigurationError, match=received):
            WeightAveraging(2, **options)
    with pytest.raises(PlanError, match=r"fragments=5\b.*\b4\b"):
        train(sgd, WeightAveraging(5, fragments=5), TWO)


def test_rounds_that_overlap_refuse_messages() -> None:
    """Two optimizers' messages at a time would be taken for each other's."""
    found = [Gradient(path, shape, "float32") for path, shape in SHAPES.items()]
    plan = make_plan(found, {"*": Scheme("pipeline")}, TWO)
    WeightAveraging(2).check(plan)
    with pytest.raises(ConfigurationError, match=r"overlap=1\b.*'pipeline'"):
        WeightAveraging(2, overlap=1).check(plan)


def test_the_stall_watch_sees_the_steps_that_a_round_overlaps() -> None:
    def work(comm: Comm) -> list[int]:
        comm.progress.watched = True
        optimizer = wrap(sgd(), comm, WeightAveraging(4, overlap=4), DENSE, "average")
        weights, seen = new_weights(), []
        for step in range(7):
            optimizer.apply(gradients(comm.rank, step), weights)
            seen.append(comm.progress.look()[0])
        consolidate(optimizer)
        return seen

    for seen in ThreadComm.run(TWO, work):
        assert all(later > before for before, later in itertools.pairwise(seen)), seen


def test_a_run_that_is_replaced_is_freed() -> None:
    """With its start weights and snapshots: a run has one for each change of scheme."""

    def work(comm: Comm) -> tuple[K.Optimizer, weakref.ref[Any]]:
        optimizer = wrap(sgd(), comm, WeightAveraging(2, overlap=2), DENSE, "average")
        weights = new_weights()
        for step in range(3):
            optimizer.apply(gradients(comm.rank, step), weights)
        (run,) = optimizer.exchanger.runs.values()
        gone = weakref.ref(run)
        del run
        optimizer.exchanger.switch(Scheme(bucket_bytes=64))
        return optimizer, gone

    ranks = ThreadComm.run(TWO, work)
    gc.collect()
    assert [gone() for _, gone in ranks] == [None, None]


def test_a_plan_whose_buckets_mix_fragments_is_refused() -> None:
    found = [Gradient(path, shape, "float32") for path, shape in SHAPES.items()]
    plan = make_plan(found, {"*": Scheme()}, Topology(1, 1))
    with pytest.raises(PlanError, match=r"fragments=2\b.*/bucket0\b"):
        WeightAveraging(2, fragments=2).check(plan)


def test_an_executor_exchanges_a_part_of_its_plan() -> None:
    """The other buckets' residuals stay as they are, and the watch sees none of them wait."""
    found = [Gradient(path, shape, "float32") for path, shape in SHAPES.items()]
    plan = make_plan(
        found, {"*": Scheme("hitopk", "exact", 0.2, dense_below=8, bucket_bytes=64)}, TWO
    )
    part = plan.__class__(plan.buckets[:1], plan.topology, plan.operation)

    def work(comm: Comm) -> tuple[list[str], list[str]]:
        comm.progress.watched = True
        executor = PlanExecutor(plan, comm)
        mine = dict(zip(SHAPES, gradients(comm.rank, 0), strict=True))
        done = executor.exchange({path: mine[path] for path in part.paths}, part)
        assert executor._waits.begun() == 1 and not executor._waits.waiting()
        kept = executor.export().residuals
        return sorted(done), sorted(kept)

    expected = sorted(part.paths)
    assert ThreadComm.run(TWO, work) == [(expected, expected)] * 2
