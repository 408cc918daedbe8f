"""PowerSGD follows its paper's definition, keeps its warm start, and learns low-rank matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tfcommx import compression
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.compression.powersgd import PowerSGD
from tfcommx.core import (
    ConfigurationError,
    Link,
    Links,
    Plan,
    PlanError,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.planner.predict import Setting
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState

SHAPES = {"conv/kernel": (3, 3, 8, 24), "conv/bias": (24,), "dense/kernel": (40, 30)}


def plan_of(topology: Topology, operation: str = "sum", compressed: str = "powersgd/2") -> Plan:
    gradients = [Gradient(path, shape, "float32") for path, shape in SHAPES.items()]
    return make_plan(gradients, {"*": Scheme(compression=compressed)}, topology, operation)


def given(rank: int, step: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng([rank, step])
    return {path: numbers.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}


def exchanged(running: PlanExecutor, gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = running.exchange({path: tf.constant(one) for path, one in gradients.items()})
    return {path: one.numpy() for path, one in found.items()}


class Definition:
    """Algorithms 1 and 2 of the paper for one matrix, in float64; each rank's error is its own."""

    def __init__(self, ranks: int, start: np.ndarray) -> None:
        self.right, self.errors = start.astype(np.float64), [np.float64(0)] * ranks

    def step(self, matrices: list[np.ndarray]) -> np.ndarray:
        wholes = [one + error for one, error in zip(matrices, self.errors, strict=True)]
        left = np.linalg.qr(sum(whole @ np.linalg.qr(self.right)[0] for whole in wholes))[0]
        own = [whole.T @ left for whole in wholes]
        self.errors = [whole - left @ one.T for whole, one in zip(wholes, own, strict=True)]
        self.right = sum(own)
        return left @ self.right.T


def test_three_steps_are_those_of_the_definition() -> None:
    topology = Topology(3, 1)

    def work(comm: Comm) -> list[dict[str, np.ndarray]]:
        running = PlanExecutor(plan_of(topology), comm)
        return [exchanged(running, given(comm.rank, step)) for step in range(3)]

    found = ThreadComm.run(topology, work)[0]
    shapes = list(SHAPES.values())[::-1]
    starts = np.split(PowerSGD(2).first_state(shapes), np.cumsum(PowerSGD(2).state_sizes(shapes)))
    for path, start in zip(["dense/kernel", "conv/bias", "conv/kernel"], starts, strict=False):
        shape = SHAPES[path]
        rows = np.prod(shape[:-1], dtype=int)
        defined = Definition(3, start.reshape(2, -1).T) if start.size else None
        for step in range(3):
            came = [given(rank, step)[path] for rank in range(3)]
            expected = (
                sum(came)
                if defined is None
                else defined.step([one.reshape(rows, -1) for one in came])
            )
            np.testing.assert_allclose(
                found[step][path].reshape(expected.shape), expected, atol=2e-4
            )


def test_a_matrix_of_the_rank_arrives_whole_by_the_second_step() -> None:
    """Power iteration finds its range; the received matrix equals it to float32 rounding."""
    topology, numbers = Topology(2, 1), np.random.default_rng(0)
    low = (numbers.normal(size=(40, 2)) @ numbers.normal(size=(2, 30))).astype(np.float32)

    def work(comm: Comm) -> list[np.ndarray]:
        running = PlanExecutor(plan_of(topology, "average"), comm)
        steps = [given(comm.rank, step) | {"dense/kernel": low} for step in range(2)]
        return [exchanged(running, one)["dense/kernel"] for one in steps]

    for found in ThreadComm.run(topology, work)[0]:
        np.testing.assert_allclose(found, low, atol=1e-4)


@pytest.mark.parametrize(
    "counted",
    [lambda sums: sums[:-1], lambda sums: (*sums, 3), lambda sums: tuple(one + 1 for one in sums)],
)
def test_a_compression_that_adds_other_vectors_than_it_counts_is_refused(
    counted: Callable[[tuple[int, ...]], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = PowerSGD.sums
    monkeypatch.setattr(PowerSGD, "sums", lambda self, shapes: counted(sums(self, shapes)))

    def work(comm: Comm) -> None:
        with pytest.raises(ValueError, match=r"'powersgd/2'.*`sums`"):
            exchanged(PlanExecutor(plan_of(comm.topology), comm), given(comm.rank, 0))

    ThreadComm.run(Topology(2, 1), work)


def test_a_finite_step_of_any_magnitude_stays_finite() -> None:
    """Squares of its entries overflow float32: all ranks received NaN."""

    def work(comm: Comm) -> None:
        running, sums, sent = PlanExecutor(plan_of(comm.topology), comm), 0.0, 0.0
        for step, factor in enumerate((1.0, 1e30, 1.0)):
            gradients = {path: value * np.float32(factor) for path, value in given(0, step).items()}
            received = exchanged(running, gradients)["dense/kernel"]
            assert np.isfinite(received).all()
            sums, sent = sums + 2.0 * gradients["dense/kernel"], sent + received
        # Both ranks have the same gradients, and so the same residual
        residual = running.export().residuals["dense/kernel"]
        np.testing.assert_allclose(sent.ravel() + 2 * residual, sums.ravel(), atol=1e25)

    ThreadComm.run(Topology(2, 1), work)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_step_leaves_the_warm_start_as_it_was(bad: float) -> None:
    topology = Topology(2, 1)

    def work(comm: Comm) -> None:
        running = PlanExecutor(plan_of(topology), comm)
        exchanged(running, given(comm.rank, 0))
        before = running.export()
        poisoned = given(comm.rank, 1)
        poisoned["dense/kernel"][3, 4] = bad if comm.rank else 1.0
        assert not np.isfinite(exchanged(running, poisoned)["dense/kernel"]).all()
        after = running.export()
        assert bool(before.compressions) == (comm.rank == 0) and after.residuals
        for path, kept in before.compressions.items():
            np.testing.assert_array_equal(after.compressions[path], kept)
        assert all(np.isfinite(one).all() for one in after.residuals.values())

    ThreadComm.run(topology, work)


def test_a_state_continues_to_the_same_bits() -> None:
    topology = Topology(2, 1)

    def work(comm: Comm) -> None:
        first = PlanExecutor(plan_of(topology), comm)
        exchanged(first, given(comm.rank, 0))
        second = PlanExecutor(plan_of(topology), comm)
        second.load(first.export())
        for step in (1, 2):
            one, other = (exchanged(each, given(comm.rank, step)) for each in (first, second))
            for path in SHAPES:
                np.testing.assert_array_equal(one[path], other[path])

    ThreadComm.run(topology, work)


def states_after(topology: Topology) -> list[GradientState]:
    def work(comm: Comm) -> GradientState:
        running = PlanExecutor(plan_of(topology), comm)
        exchanged(running, given(comm.rank, 0))
        return running.export()

    return ThreadComm.run(topology, work)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_warm_start_and_residuals_reach_other_ranks(ranks: int) -> None:
    """Four ranks' parts on fewer: the warm start is unchanged, residuals keep their sum."""
    before = states_after(Topology(4, 1))

    def work(comm: Comm) -> GradientState:
        running = PlanExecutor(plan_of(comm.topology), comm)
        parts = (state.times(0.5) for state in before[comm.rank :: ranks])
        running.load(sum(parts, GradientState()))
        return running.export()

    after = ThreadComm.run(Topology(ranks, 1), work)
    assert before[0].compressions and not any(state.compressions for state in after[1:])
    for path, kept in before[0].compressions.items():
        np.testing.assert_array_equal(after[0].compressions[path], kept)
    for path in before[0].residuals:
        total, expected = (sum(one.residuals[path] for one in all_) for all_ in (after, before))
        np.testing.assert_allclose(total, 0.5 * expected, atol=1e-5)


def test_another_rank_begins_its_own_warm_start_and_keeps_the_residual() -> None:
    parts = states_after(Topology(2, 1))

    def work(comm: Comm) -> GradientState:
        running = PlanExecutor(plan_of(comm.topology, compressed="powersgd/1"), comm)
        first = running.export()
        running.load(parts[comm.rank])
        for path, kept in running.export().compressions.items():
            np.testing.assert_array_equal(kept, first.compressions[path])
        return running.export()

    kept = ThreadComm.run(Topology(2, 1), work)
    for path in ("conv/kernel", "dense/kernel"):
        one, other = (sum(part.residuals[path] for part in each) for each in (kept, parts))
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_vectors_and_small_matrices_travel_as_they_are() -> None:
    """A bucket without a gain is a plain one; nothing is kept of it."""
    sizes = PowerSGD(4).state_sizes([(100, 50), (50,), (8, 8)])
    assert sizes == (200, 0, 0) and PowerSGD(4).sums([(100, 50), (50,), (8, 8)]) == (514, 200)
    assert PowerSGD(4).sums([(50,), (8, 8)]) == ()
    gradients = [Gradient("bias", (50,), "float32"), Gradient("wide", (400, 300), "float64")]
    plan = make_plan(gradients, {"*": Scheme(compression="powersgd/4")}, Topology(2, 1))
    assert [bucket.compression for bucket in plan.buckets] == ["none"] * len(plan.buckets)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("powersdg/4", r"'powersdg'.*'powersgd'"),
        ("powersgd/0", "compression='powersgd/0'"),
        ("powersgd/x", "compression='powersgd/x'"),
        ("no.such.module:MEMBER", r"'no\.such\.module:MEMBER'.*'no'"),
        ("tfcommx.core:PLAIN", r"Compression\b.*'tfcommx\.core:PLAIN'"),
    ],
)
def test_a_name_that_is_none_is_refused(asked: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compression.get(asked)


@pytest.mark.parametrize(
    "more",
    [{"selection": "mstopk", "route": "hitopk", "density": 0.1}, {"wire": "float16"}],
)
def test_a_scheme_compresses_or_selects(more: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=r"compression='powersgd/4'.*selection=.*wire="):
        Scheme(compression="powersgd/4", **more)


def test_a_step_is_simulated_where_the_engine_fuses() -> None:
    """Both sums of each bucket are separate messages; fewer bytes take less time."""
    rows = tuple(VariableProfile(f"w{i}", (600, 400), ready_s=0.001) for i in range(3))
    profile = Profile("matrices", rows, 0.01, 0.02, 8)
    slow = Link(1e-5, 1e-8)
    setting = Setting(profile, Topology(4, 1), Links(slow, slow, fuses=True))
    plain, compressed = (
        setting.predict(Scheme(compression=name, bucket_bytes=10**6))
        for name in ("none", "powersgd/4")
    )
    assert len(compressed.plan.buckets) > 1
    assert compressed.bytes_between < 0.1 * plain.bytes_between
    assert compressed.step_s < plain.step_s
