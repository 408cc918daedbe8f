"""GradientState: shards, pieces, dense buckets, momentum, other numbers of ranks, rates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Plan, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState, stretches
from tfcommx.runtime.residuals import GradientStore

GRADIENTS = [Gradient("a", (3, 2), "float32"), Gradient("b", (5,), "float32")]

ALONE = Topology(1, 1)


def plan_for(scheme: Scheme, topology: Topology, **more: int) -> Plan:
    return make_plan(GRADIENTS, {"*": scheme}, topology, "sum", **more)


def test_a_residual_that_all_ranks_share_is_exported_once_and_survives_any_number_of_them() -> None:
    """To the bit, though a third of it has no exact value in float32."""
    shared = {"a": np.float32([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])}

    def work(comm: Comm) -> GradientState:
        first, second = (PlanExecutor(plan_for(Scheme(), comm.topology), comm) for _ in range(2))
        assert not first.load(GradientState(shared if comm.rank == 0 else {})).variables
        second.load(first.export())
        return second.export()

    for ranks in (1, 2, 3):
        of_root, *of_others = ThreadComm.run(Topology(ranks, 1), work)
        assert of_root.residuals["a"].tobytes() == shared["a"].tobytes()
        assert not any(state.residuals for state in of_others)


def test_pieces_of_a_variable_come_together_and_zeros_are_left_out() -> None:
    scheme = Scheme("allgather", "exact", 0.5, dense_below=0)
    plan = plan_for(scheme, Topology(1, 1), largest=4)
    assert any("a[3:6]" in bucket.variables for bucket in plan.buckets)
    given = {"a": np.float32([0, 0, 0, 1, 2, 3])}

    def work(comm: Comm) -> GradientState:
        running = PlanExecutor(plan, comm)
        running.load(GradientState(given))
        return running.export()

    (state,) = ThreadComm.run(Topology(1, 1), work)
    assert {path: part.tolist() for path, part in state.residuals.items()} == {
        "a": [0, 0, 0, 1, 2, 3]
    }


def test_a_shard_holds_stretches_of_variables_and_never_padding() -> None:
    plan = plan_for(Scheme("hitopk", "exact", 0.5, dense_below=0), Topology(2, 4))
    (bucket,) = (one for one in plan.buckets if one.k is not None)
    assert bucket.padding
    length, seen = bucket.padded // 4, []
    for slot in range(4):
        shard = slice(slot * length, (slot + 1) * length)
        for path, of_variable, of_shard in stretches(bucket, shard):
            assert of_variable.stop - of_variable.start == of_shard.stop - of_shard.start > 0
            assert of_shard.start >= 0 and of_shard.stop <= length
            seen += [(path, entry) for entry in range(of_variable.start, of_variable.stop)]
    assert seen == [("a", entry) for entry in range(6)]


def test_sums_are_of_vectors_and_the_highest_numbers_count() -> None:
    one = GradientState({"a": np.float32([1, 2])}, steps={"a": 3}, rates={"a": -1, "b": 2})
    other = GradientState(
        {"a": np.float32([3, 4]), "b": np.float32([5])}, steps={"a": 2}, rates={"b": -4}
    )
    total = sum([one.times(2), other], GradientState())
    assert {path: part.tolist() for path, part in total.residuals.items()} == {
        "a": [5, 8],
        "b": [5],
    }
    assert total.steps == {"a": 3} and total.rates == {"a": -1, "b": 2}
    assert total.of({"b"}).variables == {"b"}


@pytest.mark.parametrize("route", ["allgather", "hitopk"])
def test_what_is_cleared_is_forgotten_and_the_rest_stays(route: str) -> None:
    scheme = Scheme(route, "exact", 0.2, dense_below=0, momentum=0.5)
    gradients = [Gradient("a", (3, 2), "float32"), Gradient("b", (5, 3), "float32")]
    plan = make_plan(gradients, {"*": scheme}, Topology(2, 2), "sum")

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm)
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones((5, 3))})
        before, exported = executor.export(), executor.export({"a", "unknown"})
        executor.clear({"a", "unknown"})
        after = executor.export()
        for kind in ("residuals", "velocities"):
            moved, whole, stays = (getattr(one, kind) for one in (exported, before, after))
            assert set(moved) <= {"a"} and "a" not in stays
            together = moved | stays
            assert together.keys() == whole.keys()
            for path, part in together.items():
                np.testing.assert_array_equal(part, whole[path])

    ThreadComm.run(Topology(2, 2), work)


def test_the_order_of_a_state_is_that_of_names() -> None:
    """Files of a checkpoint are compared by their bytes, and a set's order has a random seed."""
    names = [f"layer{number}" for number in range(20, 0, -1)]
    plan = make_plan([Gradient(name, (4,), "float32") for name in names], {"*": Scheme()}, ALONE)

    def work(comm: Comm) -> list[str]:
        return list(PlanExecutor(plan, comm).export().steps)

    assert ThreadComm.run(ALONE, work) == [sorted(names)]


def test_a_dense_bucket_has_no_residual_until_one_comes() -> None:
    plan = plan_for(Scheme(), Topology(2, 1))

    def work(comm: Comm) -> tuple[list[float], list[float], bool]:
        store = GradientStore(plan, comm)
        (state,) = store.states.values()
        assert state.residual is None and state.pending is None
        executor = PlanExecutor(plan, comm)
        executor.load(GradientState({"b": np.full(5, 1 + comm.rank, np.float32)}))
        zeros = {"a": tf.zeros((3, 2)), "b": tf.zeros(5)}
        first, second = (executor.exchange(zeros)["b"].numpy().tolist() for _ in range(2))
        return first, second, bool(executor.export().residuals)

    assert ThreadComm.run(Topology(2, 1), work) == [([3] * 5, [0] * 5, False)] * 2


def test_loaded_steps_were_not_taken_by_this_process() -> None:
    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan_for(Scheme(), comm.topology), comm)
        for steps in (2, 3):
            executor.load(GradientState(steps={"a": steps}))
        assert executor.dense_bytes_between_nodes() == 0
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones(5)})
        assert executor.dense_bytes_between_nodes() == 4 * (6 + 5)

    ThreadComm.run(Topology(2, 1), work)


def test_a_plan_without_momentum_returns_the_velocities() -> None:
    given = GradientState(velocities={"a": np.ones(6, np.float32)}, steps={"a": 1})

    def work(comm: Comm) -> GradientState:
        return PlanExecutor(plan_for(Scheme(), comm.topology), comm).load(given)

    (rest,) = ThreadComm.run(ALONE, work)
    assert rest.velocities == given.velocities and rest.variables == {"a"} and not rest.steps


@pytest.mark.parametrize("topology", [Topology(3, 1), Topology(2, 2)])
@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("allgather", "random", 0.2, dense_below=0),
        Scheme("hitopk", "exact", 0.2, dense_below=6, momentum=0.9),
        Scheme("torus", wire="float16"),
        Scheme("asa", wire="int1"),
        Scheme("torus", wire="int4"),
        Scheme("allreduce", compression="powersgd/1"),
    ],
)
def test_a_state_is_restored_to_the_bit_on_the_same_plan(
    scheme: Scheme, topology: Topology
) -> None:
    """Also numbers so small that TensorFlow may flush them, steps and the highest rate."""
    gradients = [Gradient("a", (30, 20), "float32"), Gradient("b", (5,), "float32")]
    plan = make_plan(gradients, {"*": scheme}, topology, "sum")

    def given(rank: int, step: int) -> dict[str, tf.Tensor]:
        numbers = np.random.default_rng([rank, step])
        whole = {one.path: numbers.normal(size=one.shape) for one in gradients}
        whole["a"][1] *= 1e-39
        return {path: tf.constant(one, tf.float32) for path, one in whole.items()}

    def work(comm: Comm) -> bool:
        first, second = PlanExecutor(plan, comm), PlanExecutor(dataclasses.replace(plan), comm)
        for step in range(2):
            first.follow_rate(tf.constant(0.25))
            first.exchange(given(comm.rank, step))
        state = first.export()
        assert not second.load(state).variables
        assert second.dense_bytes_between_nodes() == 0
        again = second.export()
        for kind, kept in vars(state).items():
            other = getattr(again, kind)
            assert kept.keys() == other.keys(), kind
            assert all(np.array_equal(part, other[path]) for path, part in kept.items()), kind
        one, other = (each.exchange(given(comm.rank, 2)) for each in (first, second))
        assert all(np.array_equal(one[path], other[path]) for path in one)
        return bool(state.residuals)

    assert all(ThreadComm.run(topology, work))


def test_residuals_shrink_while_the_rate_rises_and_never_grow() -> None:
    """And a state that continues knows the highest rate; one without a rate shrinks nothing."""
    plan = plan_for(Scheme("allgather", "exact", 0.2, dense_below=0), Topology(1, 1))

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm)
        start = np.arange(1, 12, dtype=np.float32)
        executor.load(GradientState({"a": start[:6], "b": start[6:]}))
        follow = tf.function(executor.follow_rate)

        def kept(rate: float) -> np.ndarray:
            follow(tf.constant(rate))
            residuals = executor.export().residuals
            return np.concatenate([residuals["a"], residuals["b"]])

        # The first rate is the measure; then 0.3 is in the octave of 0.25
        rates, factors = (0.25, 0.3, 0.5, 0.9, 0.1, 0.6, 4.0), (1, 1, 2, 2, 2, 2, 16)
        for rate, factor in zip(rates, factors, strict=True):
            np.testing.assert_array_equal(kept(rate), start / factor)
        state = executor.export()
        again = PlanExecutor(plan, comm)
        again.load(state)
        again.follow_rate(tf.constant(8.0))
        np.testing.assert_array_equal(again.export().residuals["a"], start[:6] / 32)

    ThreadComm.run(Topology(1, 1), work)


def test_residuals_of_momenta_shrink_whenever_the_rate_rises() -> None:
    """By its jumps: a rate that varies around a power of two changes nothing."""
    plan = plan_for(Scheme("allgather", "exact", 0.2, dense_below=0), Topology(1, 1))

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm, divided_by_rate=True)
        start = np.arange(1, 12, dtype=np.float32)
        executor.load(GradientState({"a": start[:6], "b": start[6:]}))
        rates = (0.25, 0.24, 0.26, 0.24, 0.01, np.nan, 0.25, 0.01, 1.0)
        factors = (1, 1, 1, 1, 1, 1, 32, 32, 32 * 128)
        for rate, factor in zip(rates, factors, strict=True):
            executor.follow_rate(tf.constant(rate, tf.float32))
            residuals = executor.export().residuals
            np.testing.assert_array_equal(residuals["a"], start[:6] / factor, err_msg=str(rate))
        again = PlanExecutor(plan, comm, divided_by_rate=True)
        again.load(executor.export())
        again.follow_rate(tf.constant(4.0))
        np.testing.assert_array_equal(again.export().residuals["a"], start[:6] / factor / 4)

    ThreadComm.run(Topology(1, 1), work)


@pytest.mark.parametrize("divided_by_rate", [False, True])
def test_a_residual_of_a_higher_rate_that_returns_to_a_plan_is_no_residual_of_its_low_one(
    divided_by_rate: bool,
) -> None:
    """As of layers that are frozen again after a warm-up: the next step shrank it by 64."""
    plan = plan_for(Scheme("allgather", "exact", 0.2, dense_below=0), Topology(1, 1))

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm, divided_by_rate)
        executor.load(GradientState({"b": np.full(5, 64, np.float32)}))
        executor.follow_rate(tf.constant(2.0**-10))
        executor.load(GradientState({"a": np.ones(6, np.float32)}, rates={"a": -4}))
        executor.follow_rate(tf.constant(2.0**-4))
        residuals = executor.export().residuals
        assert (residuals["a"] == 1).all() and (residuals["b"] == 1).all()

    ThreadComm.run(Topology(1, 1), work)


def test_rates_that_are_no_numbers_or_negative_change_nothing_that_they_should_not() -> None:
    plan = plan_for(Scheme("allgather", "exact", 0.2, dense_below=0), Topology(1, 1))

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm)
        executor.follow_rate(tf.constant(-0.25))
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones(5)})
        for rate in (np.nan, np.inf, -0.3, -0.0, 0.25):
            executor.follow_rate(tf.constant(rate, tf.float32))
            assert executor.export().residuals["a"].max() == 1, rate
        executor.follow_rate(tf.constant(0.5))
        assert executor.export().residuals["a"].max() == 0.5

    ThreadComm.run(Topology(1, 1), work)


def test_gradients_of_a_rate_of_zero_are_never_applied() -> None:
    plan = plan_for(Scheme("allgather", "exact", 0.2, dense_below=0), Topology(1, 1))

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm)
        executor.follow_rate(tf.constant(0.0))
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones(5)})
        assert executor.export().residuals["a"].max() == 1
        executor.follow_rate(tf.constant(0.1))
        assert executor.export().residuals["a"].max() < 1e-30
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones(5)})
        executor.follow_rate(tf.constant(0.0))
        assert executor.export().residuals["a"].max() == 1

    ThreadComm.run(Topology(1, 1), work)
