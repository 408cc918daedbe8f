"""Law 2: what a step does not send stays in residuals, exactly."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from laws_helpers import (
    SCHEMES,
    SHAPES,
    WIRED,
    plan_for,
    play,
    with_topologies,
)

from tfcommx.comm.base import Comm
from tfcommx.comm.threads import ThreadComm
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.terms import Scheme, Topology


@with_topologies(SCHEMES + WIRED)
def test_law_2_conservation(scheme: Scheme, topology: Topology) -> None:
    """In each entry, sent plus residuals equals gradients plus earlier residuals, exactly."""
    logs = play(plan_for(scheme, topology), steps=3)
    before = {path: np.zeros(np.prod(shape), np.float32) for path, shape in SHAPES.items()}
    for step in range(3):
        for path in SHAPES:
            came = sum(log[step][0][path].ravel() for log in logs)
            stays = sum(log[step][2][path] for log in logs)
            sent = logs[0][step][1][path].ravel()
            np.testing.assert_array_equal(sent + stays, came + before[path])
            before[path] = stays


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_a_dense_step_cannot_carry_stays_owed(dtype: str) -> None:
    """A NaN in an entry that has a residual, and digits for which float16 has no room."""
    plan = make_plan([Gradient("a", (4,), dtype)], {"*": Scheme()}, Topology(2, 1), "sum")
    residuals = np.array([0.024, 0.0001, 3.0, 0.0], np.float32)

    def work(comm: Comm) -> tuple[np.ndarray, np.ndarray]:
        running = PlanExecutor(plan, comm)
        running.import_residuals({"a": residuals} if comm.rank == 0 else {})
        result = (
            running.exchange({"a": tf.cast([512.0, 512.0, np.nan, 1.0], dtype)})["a"]
            .numpy()
            .astype(np.float32)
        )
        return result, running.state().residuals_by_variable().get("a", np.zeros(4))

    (sent, one), (_, other) = ThreadComm.run(Topology(2, 1), work)
    assert np.isnan(sent[2]) and (one + other)[2] == 3 and sent[3] == 2
    np.testing.assert_allclose(
        sent[:2].astype(np.float64) + (one + other)[:2],
        1024 + residuals[:2],
        atol=1e-4 if dtype == "float32" else 1e-6,
    )
