"""Residuals by bucket and by variable: shards, pieces, dense buckets, momentum."""

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
from tfcommx.runtime.residuals import (
    PlanState,
    ResidualStore,
    VariableState,
    residuals_by_variable,
    sum_residuals,
)

GRADIENTS = [Gradient("a", (3, 2), "float32"), Gradient("b", (5,), "float32")]


def plan_for(scheme: Scheme, topology: Topology, **more: int) -> Plan:
    return make_plan(GRADIENTS, {"*": scheme}, topology, "sum", **more)


def test_a_dense_bucket_gives_each_rank_its_part_of_the_sum() -> None:
    plan = plan_for(Scheme(), Topology(2, 2))
    kept = {bucket.name: np.full(bucket.padded, 4, np.float32) for bucket in plan.buckets}
    found = residuals_by_variable(plan, kept, rank=1)
    assert {path: part.tolist() for path, part in found.items()} == {"a": [1] * 6, "b": [1] * 5}


def test_pieces_of_a_variable_come_together_and_zeros_are_left_out() -> None:
    scheme = Scheme("allgather", "exact", 0.5, dense_below=0)
    plan = plan_for(scheme, Topology(2, 1), largest=4)
    assert any("a[3:6]" in bucket.variables for bucket in plan.buckets)
    kept = {
        bucket.name: np.concatenate(
            [
                np.arange(1, size + 1) if name == "a[3:6]" else np.zeros(size)
                for name, size in zip(bucket.variables, bucket.sizes, strict=True)
            ]
            + [np.zeros(bucket.padding)]
        )
        for bucket in plan.buckets
    }
    found = residuals_by_variable(plan, kept, rank=0)
    assert {path: part.tolist() for path, part in found.items()} == {"a": [0, 0, 0, 1, 2, 3]}


def test_sums_are_of_what_is_there() -> None:
    one, other = {"a": np.float32([1, 2])}, {"a": np.float32([3, 4]), "b": np.float32([5])}
    total = sum_residuals([one, other], 2.0)
    assert {path: part.tolist() for path, part in total.items()} == {"a": [8, 12], "b": [10]}
    assert sum_residuals([]) == {}


@pytest.mark.parametrize("route", ["allgather", "hitopk"])
def test_what_is_exported_is_forgotten_and_the_rest_stays(route: str) -> None:
    scheme = Scheme(route, "exact", 0.2, dense_below=0, momentum=0.5)
    gradients = [Gradient("a", (3, 2), "float32"), Gradient("b", (5, 3), "float32")]
    plan = make_plan(gradients, {"*": scheme}, Topology(2, 2), "sum")

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm)
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones((5, 3))})
        before = executor.state()
        residuals, velocities, _ = executor.export_by_variable({"a", "unknown"})
        after = executor.state()
        for exported, all_of_them, remaining in (
            (residuals, before.by_variable().residuals, after.by_variable().residuals),
            (velocities, before.by_variable().velocities, after.by_variable().velocities),
        ):
            assert set(exported) <= {"a"} and "a" not in remaining
            together = exported | remaining
            assert together.keys() == all_of_them.keys()
            for path, part in together.items():
                np.testing.assert_array_equal(part, all_of_them[path])

    ThreadComm.run(Topology(2, 2), work)


def test_a_dense_bucket_has_no_residual_until_one_comes() -> None:
    plan = plan_for(Scheme(), Topology(2, 1))

    def work(comm: Comm) -> tuple[list[float], list[float], bool]:
        store = ResidualStore(plan, comm)
        (state,) = store.states.values()
        assert state.residual is None and state.pending is None
        executor = PlanExecutor(plan, comm)
        executor.import_by_variable(VariableState({"b": np.full(5, 1 + comm.rank, np.float32)}))
        zeros = {"a": tf.zeros((3, 2)), "b": tf.zeros(5)}
        first, second = (executor.exchange(zeros)["b"].numpy().tolist() for _ in range(2))
        return first, second, bool(executor.state().by_variable().residuals)

    assert ThreadComm.run(Topology(2, 1), work) == [([3] * 5, [0] * 5, False)] * 2


def test_a_state_continues_under_an_equal_plan() -> None:
    scheme = Scheme("allgather", "exact", 0.2, dense_below=0)
    plan = plan_for(scheme, Topology(2, 1))

    def work(comm: Comm) -> None:
        first = PlanExecutor(plan, comm)
        given = {"a": tf.random.normal((3, 2)), "b": tf.random.normal((5,))}
        first.exchange(given)
        state = first.state()
        second = PlanExecutor(dataclasses.replace(plan), comm)
        second.continue_from(state)
        assert second.dense_bytes_between_nodes() == 0
        for path, value in first.exchange(given).items():
            np.testing.assert_array_equal(value, second.exchange(given)[path])
            break

    ThreadComm.run(Topology(2, 1), work)


def test_residuals_shrink_while_the_rate_rises_and_never_grow() -> None:
    """And a state that goes on knows the highest rate; one without a rate shrinks nothing."""
    plan = plan_for(Scheme("allgather", "exact", 0.2, dense_below=0), Topology(1, 1))

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm)
        (bucket,) = (one for one in plan.buckets if one.k is not None)
        start = np.arange(1, 1 + bucket.padded, dtype=np.float32)
        executor.continue_from(PlanState(plan, 0, comm.rank, {bucket.name: start}, {}))
        follow = tf.function(executor.follow_rate)

        def kept(rate: float) -> np.ndarray:
            follow(tf.constant(rate))
            return executor.state().residuals[bucket.name]

        # The first rate is the measure; then 0.3 is in the octave of 0.25
        rates, factors = (0.25, 0.3, 0.5, 0.9, 0.1, 0.6, 4.0), (1, 1, 2, 2, 2, 2, 16)
        for rate, factor in zip(rates, factors, strict=True):
            np.testing.assert_array_equal(kept(rate), start / factor)
        state = executor.state()
        again = PlanExecutor(plan, comm)
        assert again.restore(state)
        again.follow_rate(tf.constant(8.0))
        np.testing.assert_array_equal(again.state().residuals[bucket.name], start / 32)

    ThreadComm.run(Topology(1, 1), work)


def test_rates_that_are_no_numbers_or_negative_change_nothing_that_they_should_not() -> None:
    plan = plan_for(Scheme("allgather", "exact", 0.2, dense_below=0), Topology(1, 1))

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm)
        executor.follow_rate(tf.constant(-0.25))
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones(5)})
        for rate in (np.nan, np.inf, -0.3, -0.0, 0.25):
            executor.follow_rate(tf.constant(rate, tf.float32))
            assert executor.state().by_variable().residuals["a"].max() == 1, rate
        executor.follow_rate(tf.constant(0.5))
        assert executor.state().by_variable().residuals["a"].max() == 0.5

    ThreadComm.run(Topology(1, 1), work)


def test_gradients_of_a_rate_of_zero_are_never_applied() -> None:
    plan = plan_for(Scheme("allgather", "exact", 0.2, dense_below=0), Topology(1, 1))

    def work(comm: Comm) -> None:
        executor = PlanExecutor(plan, comm)
        executor.follow_rate(tf.constant(0.0))
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones(5)})
        assert executor.state().by_variable().residuals["a"].max() == 1
        executor.follow_rate(tf.constant(0.1))
        assert executor.state().by_variable().residuals["a"].max() < 1e-30
        executor.exchange({"a": tf.ones((3, 2)), "b": tf.ones(5)})
        executor.follow_rate(tf.constant(0.0))
        assert executor.state().by_variable().residuals["a"].max() == 1

    ThreadComm.run(Topology(1, 1), work)
