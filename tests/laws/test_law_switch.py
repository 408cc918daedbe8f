"""A switch of plans loses neither residuals nor velocities."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from drawing import triples
from laws_helpers import (
    ADDED_WIDE,
    CODED,
    MOVING,
    RULES,
    SCHEMES,
    SHAPES,
    SPARSE,
    UNLIKE,
    fine_gradients,
    gradients,
    name_of,
    plan_for,
    residuals_of,
    scheme,
    velocities,
)

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState


@pytest.mark.parametrize(
    ("after", "before", "topology"),
    triples(
        SCHEMES + ADDED_WIDE,
        [scheme(route, RULES[0], 0.1) for route in SPARSE] + ADDED_WIDE,
        UNLIKE,
    ),
    ids=name_of,
)
def test_a_switch_loses_nothing(before: Scheme, after: Scheme, topology: Topology) -> None:
    """Residuals of one plan are sent under the next: sums over ranks and steps are exact."""
    came, sent, residuals = _switch(before, after, topology)
    for path in SHAPES:
        np.testing.assert_array_equal(sent[path] + residuals[path], came[path])
        if after.route in routes.DENSE and after not in ADDED_WIDE:
            assert not residuals[path].any()


@pytest.mark.parametrize(
    ("before", "after", "topology"),
    triples(
        CODED, [scheme("allreduce"), scheme("hitopk", RULES[0], 0.1), CODED[0], CODED[-1]], UNLIKE
    ),
    ids=name_of,
)
def test_a_switch_from_codes_loses_nothing(
    before: Scheme, after: Scheme, topology: Topology
) -> None:
    """To float32 rounding, in both directions."""
    for one, other in ((before, after), (after, before)):
        came, sent, residuals = _switch(one, other, topology)
        for path in SHAPES:
            np.testing.assert_allclose(sent[path] + residuals[path], came[path], atol=1e-3)
            if other.route == "allreduce":
                assert not residuals[path].any()


def _switch(
    before: Scheme, after: Scheme, topology: Topology
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Take two steps with each scheme; return the sums of gradients, results and last residuals."""

    def work(comm: Comm) -> tuple[dict, dict]:
        sent = {path: 0 for path in SHAPES}
        residuals: dict = {}
        for part, current in enumerate((before, after)):
            running = PlanExecutor(plan_for(current, topology), comm)
            running.load(GradientState(residuals))
            for step in range(2):
                given = fine_gradients(comm.rank, 2 * part + step)
                result = running.exchange({path: tf.constant(given[path]) for path in SHAPES})
                sent = {path: sent[path] + value.numpy().ravel() for path, value in result.items()}
            residuals = residuals_of(running)
        return sent, residuals

    ends = ThreadComm.run(topology, work)
    came = {
        path: sum(
            fine_gradients(rank, step)[path].ravel()
            for rank in range(topology.size)
            for step in range(4)
        )
        for path in SHAPES
    }
    return (
        came,
        ends[0][0],
        {path: sum(residuals[path] for _, residuals in ends) for path in SHAPES},
    )


@pytest.mark.parametrize(
    ("before", "after", "topology"), triples(MOVING, MOVING[::-1], UNLIKE), ids=name_of
)
def test_a_switch_keeps_the_sum_of_velocities(
    before: Scheme, after: Scheme, topology: Topology
) -> None:
    """Also if the new density makes other buckets, and if a sparse variable becomes dense."""
    after = dataclasses.replace(after, density=0.3, dense_below=500)

    def work(comm: Comm) -> tuple[dict, dict]:
        first = PlanExecutor(plan_for(before, topology), comm)
        first.exchange(
            {path: tf.constant(value) for path, value in gradients(comm.rank, 0).items()}
        )
        second, had = PlanExecutor(plan_for(after, topology), comm), velocities(first)
        second.load(GradientState(residuals_of(first), had))
        return had, velocities(second)

    ends = ThreadComm.run(topology, work)
    for path in SHAPES:
        had = sum(had[path] for had, _ in ends)
        assert had.any()
        np.testing.assert_allclose(sum(has[path] for _, has in ends), had, rtol=1e-6)


def test_a_residual_that_momentum_made_is_not_moved_again() -> None:
    """One sparse step, then dense steps without a gradient: a residual is sent once.

    100 entries of gradient 1, momentum 0.9.
    """
    given = [Gradient("a", (10, 10), "float32")]
    topology, zeros = Topology(2, 1), {"a": tf.zeros([10, 10])}

    def work(comm: Comm) -> float:
        sparse = Scheme("allgather", "exact", 0.1, dense_below=0, momentum=0.9)
        first = PlanExecutor(make_plan(given, {"*": sparse}, topology, "sum"), comm)
        sent = float(tf.reduce_sum(first.exchange({"a": tf.ones([10, 10])})["a"]))
        plan = make_plan(
            given, {"*": dataclasses.replace(sparse, dense_below=10**6)}, topology, "sum"
        )
        second = PlanExecutor(plan, comm)
        kept = first.export()
        second.load(kept)
        return sent + sum(float(tf.reduce_sum(second.exchange(zeros)["a"])) for _ in range(200))

    for total in ThreadComm.run(topology, work):
        # As in the sparse kernel: sent entries have velocity zero, the others continue to move
        np.testing.assert_allclose(total, 2 * (10 + 90 * 10), rtol=1e-4)
