"""Momentum and clipping before accumulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from laws_helpers import (
    MOVING,
    SHAPES,
    gradients,
    name_of,
    plan_for,
    play,
    residuals_of,
    velocities,
)

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.bucket_runner import clip_before_accumulation
from tfcommx.runtime.executor import PlanExecutor


@pytest.mark.parametrize("operation", ["average", "sum"])
@pytest.mark.parametrize("scheme", MOVING, ids=name_of)
def test_momentum_of_dense_variables_is_the_optimizers(scheme: Scheme, operation: str) -> None:
    """Biases are sent dense, with the momentum of SGD, which is the same on all ranks."""
    for log in play(plan_for(scheme, Topology(2, 2), operation), steps=3):
        expected: Any = 0
        for step, (_, result, *_) in enumerate(log):
            total = sum(gradients(rank, step)["first/bias"] for rank in range(4))
            expected = 0.5 * expected + (total / 4 if operation == "average" else total)
            np.testing.assert_allclose(result["first/bias"], expected, rtol=1e-6)


@pytest.mark.parametrize("scheme", MOVING, ids=name_of)
def test_with_momentum_nothing_that_was_accumulated_is_lost(scheme: Scheme) -> None:
    """Sent plus new residual equals old residual plus velocity; sent entries have velocity zero."""
    path = "last/kernel"

    def work(comm: Comm) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        running, log = PlanExecutor(plan_for(scheme, comm.topology), comm), []
        for step in range(3):
            result = running.exchange(
                {name: tf.constant(value) for name, value in gradients(comm.rank, step).items()}
            )
            log.append(
                (
                    result[path].numpy().ravel(),
                    residuals_of(running)[path],
                    velocities(running)[path],
                )
            )
        return log

    logs = ThreadComm.run(Topology(2, 2), work)
    kept = moving = np.zeros(np.prod(SHAPES[path]), np.float32)
    for step in range(3):
        moved = 0.5 * moving + sum(gradients(rank, step)[path].ravel() for rank in range(4))
        now = sum(log[step][1] for log in logs)
        np.testing.assert_array_equal(logs[0][step][0] + now, kept + moved)
        kept, moving = now, sum(log[step][2] for log in logs)
        assert (moving != moved).any()


@pytest.mark.parametrize("operation", ["average", "sum"])
def test_gradients_are_clipped_on_each_rank_by_their_joint_norm(operation: str) -> None:
    scheme = Scheme("allgather", "exact", 0.1, dense_below=8, bucket_bytes=2000, clip_norm=3.0)
    for log in play(plan_for(scheme, Topology(2, 2), operation), steps=1):
        given, _, residuals, *_ = log[0]
        norm = np.sqrt(sum(np.square(value).sum(dtype=np.float64) for value in given.values()))
        limit = 3.0 * 2 if operation == "average" else 3.0 / 2
        kept = residuals["last/kernel"]
        rest = np.flatnonzero(kept)
        assert rest.size
        np.testing.assert_allclose(
            kept[rest], given["last/kernel"].ravel()[rest] * limit / norm, rtol=1e-5
        )


def test_any_seed_and_a_scale_that_float16_cannot_hold() -> None:
    play(plan_for(Scheme("allgather", "random", 0.1, seed=2**62), Topology(2, 1)), 1)
    (clipped,) = clip_before_accumulation([tf.fill([4096], tf.constant(6e4, tf.float16))], 0.1, 64)
    assert np.linalg.norm(clipped.numpy().astype(np.float32)) == pytest.approx(0.0125, rel=0.01)


def test_a_velocity_beyond_float16_is_clipped() -> None:
    """All steps were Inf until it had decayed. An infinite sum still reaches the ranks."""
    scheme = Scheme("allgather", "exact", 0.1, momentum=0.5)
    plan = make_plan([Gradient("a", (2,), "float16")], {"*": scheme}, Topology(2, 1), "sum")

    def work(comm: Comm) -> list[list[float]]:
        running = PlanExecutor(plan, comm)
        steps = [[28672, -28672], [28672, -28672], [np.inf, 0], [0, 0]]
        return [
            running.exchange({"a": tf.constant(step, tf.float16)})["a"].numpy().tolist()
            for step in steps
        ]

    for results in ThreadComm.run(Topology(2, 1), work):
        # The velocity keeps its size, 86016, and an infinite sum does not enter it
        assert results == [[57344, -57344], [65504, -65504], [np.inf, -43008], [43008, -21504]]
