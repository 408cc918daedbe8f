"""Law 2: entries that a step does not send stay in residuals, exactly; law 3 of the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from drawing import drawn
from laws_helpers import (
    ADDED_WIDE,
    CODED,
    COMPRESSED,
    ROUNDED,
    SCHEMES,
    SEARCHED,
    SHAPES,
    WIRED,
    fine_gradients,
    gradients,
    name_of,
    plan_for,
    play,
    scheme,
    with_topologies,
)

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState
from tfcommx.testing.laws import check_agreement, check_conservation

OFTEN = [one for one in SCHEMES if one not in SEARCHED[1:]]


@with_topologies(OFTEN + WIRED + ADDED_WIDE, Topology(2, 2), SEARCHED[1:])
def test_law_2_conservation(scheme: Scheme, topology: Topology) -> None:
    """In each entry, sent plus residuals equals gradients plus earlier residuals, exactly."""
    rounds = scheme in ADDED_WIDE
    logs = play(plan_for(scheme, topology), 3, fine_gradients if rounds else gradients)
    if rounds and topology.size > 1:
        assert all(log[0][2]["first/kernel"].any() for log in logs)
        for path, result in logs[0][0].result.items():
            came = [log[0].came[path] for log in logs]
            # Rounded to 8 bits twice: the numbers that each rank or node writes, and their sum
            bound = 2**-8 * (1.01 * np.abs(came).sum(axis=0) + np.abs(sum(came)))
            assert (np.abs(result - sum(came)) <= bound).all()
    check_conservation(logs, name_of(scheme))
    check_agreement(logs, name_of(scheme))


@with_topologies(CODED, first=Topology(2, 2))
def test_law_2_of_codes(scheme: Scheme, topology: Topology) -> None:
    """To float32 rounding, also if blocks have entries of all magnitudes."""

    def source(rank: int, step: int) -> dict[str, np.ndarray]:
        numbers = np.random.default_rng([rank, step])
        return {
            path: (value * 10.0 ** numbers.integers(-6, 3, value.shape)).astype(np.float32)
            for path, value in gradients(rank, step).items()
        }

    for given in (gradients, source):
        logs = play(plan_for(scheme, topology), 3, given)
        check_conservation(logs, name_of(scheme), tolerance=1e-6)
        check_agreement(logs, name_of(scheme))
        assert all(log[2].kept["first/kernel"].any() == (topology.size > 1) for log in logs)


@with_topologies(CODED, first=Topology(3, 1))
def test_averages_of_codes_are_sums_divided(scheme: Scheme, topology: Topology) -> None:
    """Codes and residuals are those of the sum."""
    sums, averages = (
        play(plan_for(scheme, topology, operation), 3) for operation in ("sum", "average")
    )
    for one, other in zip(sums, averages, strict=True):
        for step, again in zip(one, other, strict=True):
            for path in SHAPES:
                np.testing.assert_array_equal(step.kept[path], again.kept[path])
                average = step.result[path] * np.float32(1 / topology.size)
                np.testing.assert_array_equal(again.result[path], average)


@with_topologies(COMPRESSED, first=Topology(2, 2))
def test_law_2_of_compressions(scheme: Scheme, topology: Topology) -> None:
    """To float32 rounding; the residuals of matrices are not zero."""
    logs = play(plan_for(scheme, topology), 3)
    check_conservation(logs, name_of(scheme), tolerance=2e-5)
    check_agreement(logs, name_of(scheme))
    for path, shape in SHAPES.items():
        stays = sum(log[2].kept[path] for log in logs)
        assert stays.any() == (topology.size > 1 and len(shape) > 1)


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(3, 1)], ids=name_of)
@pytest.mark.parametrize("route", ["allreduce", "torus"])
def test_law_2_where_the_engine_adds_in_float16(route: str, topology: Topology) -> None:
    """Numbers written plus residuals are exact, and the sum is that of the numbers written.

    A rank writes; on the torus a node writes, and its slots keep their rounding errors.
    """
    logs = play(plan_for(scheme(route, wire="float16"), topology), 3, fine_gradients)
    together = topology.slots if route == "torus" else 1
    writers = [logs[first : first + together] for first in range(0, topology.size, together)]
    for path in SHAPES:
        before: list[Any] = [0.0] * len(writers)
        for step in range(3):
            total: Any = 0
            for number, ranks in enumerate(writers):
                came = sum(log[step][0][path].ravel().astype(np.float64) for log in ranks)
                stays = sum(log[step][2][path].astype(np.float64) for log in ranks)
                wrote = came + before[number] - stays
                before[number] = stays
                # Divided by 4: the power of two that is at least the number of ranks
                half = (wrote / 4).astype(np.float16)
                np.testing.assert_array_equal(half.astype(np.float64) * 4, wrote)
                total = total + half
            assert total.dtype == np.float16 and before[0].any()
            np.testing.assert_array_equal(
                logs[0][step][1][path].ravel(), total.astype(np.float32) * 4
            )


@pytest.mark.parametrize(
    ("scheme", "value"),
    drawn(
        [one for one in ROUNDED if one not in CODED],
        [60000.0, 70000.0, 1e9],
        [2.0**100, 2.0**-26, 2.0**-100],
    ),
    ids=name_of,
)
def test_what_16_bits_cannot_hold_stays_finite_and_is_kept(scheme: Scheme, value: float) -> None:
    """Numbers beyond float16, whose sums are further beyond, and below its smallest."""

    def source(rank: int, step: int) -> dict[str, np.ndarray]:
        return {
            path: np.full(shape, value if step == 0 else 0, np.float32)
            for path, shape in SHAPES.items()
        }

    logs = play(plan_for(scheme, Topology(2, 2)), 3, source)
    for path, shape in SHAPES.items():
        sent = sum(logs[0][step][1][path].ravel().astype(np.float64) for step in range(3))
        stays = sum(log[2][2][path].astype(np.float64) for log in logs)
        assert np.isfinite(sent).all() and np.isfinite(stays).all()
        whole = np.full(np.prod(shape), 4 * np.float64(np.float32(value)))
        np.testing.assert_array_equal(sent + stays, whole)
        if value == 60000 or (value == 70000 and scheme.route != "allreduce"):
            assert not stays.any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_a_dense_step_cannot_carry_stays_owed(dtype: str) -> None:
    """A NaN in an entry that has a residual, and digits for which float16 has no room."""
    plan = make_plan([Gradient("a", (4,), dtype)], {"*": Scheme()}, Topology(2, 1), "sum")
    residuals = np.array([0.024, 0.0001, 3.0, 0.0], np.float32)

    def work(comm: Comm) -> tuple[np.ndarray, np.ndarray]:
        running = PlanExecutor(plan, comm)
        running.load(GradientState({"a": residuals} if comm.rank == 0 else {}))
        result = (
            running.exchange({"a": tf.cast([512.0, 512.0, np.nan, 1.0], dtype)})["a"]
            .numpy()
            .astype(np.float64)
        )
        return result, running.export().residuals.get("a", np.zeros(4))

    (sent, one), (_, other) = ThreadComm.run(Topology(2, 1), work)
    assert np.isnan(sent[2]) and (one + other)[2] == 3 and sent[3] == 2
    np.testing.assert_allclose(
        sent[:2] + (one + other)[:2],
        1024 + residuals[:2].astype(np.float64),
        rtol=0,
        atol=1e-9 if dtype == "float64" else 1e-4,
    )


def test_a_residual_beyond_float16_is_sent_in_parts() -> None:
    """As of a sparse scheme before: all steps after the change of scheme were Inf."""
    plan = make_plan([Gradient("a", (2,), "float16")], {"*": Scheme()}, Topology(2, 1), "sum")

    def work(comm: Comm) -> list[list[float]]:
        running = PlanExecutor(plan, comm)
        running.load(GradientState({"a": np.array([50000.0, -1.0], np.float32)}))
        zeros = {"a": tf.zeros([2], tf.float16)}
        return [running.exchange(zeros)["a"].numpy().tolist() for _ in range(3)]

    for results in ThreadComm.run(Topology(2, 1), work):
        assert results == [[65504.0, -2.0], [34496.0, 0.0], [0.0, 0.0]]
