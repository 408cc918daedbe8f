"""The laws hold while plans take turns, and when one of them stays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from drawing import case, drawn
from laws_helpers import RULES, SHAPES, gradients, name_of, plan_for, scheme

from tfcommx import routes
from tfcommx.collectives.comm import IDLE, Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Plan, Topology
from tfcommx.runtime.gradient_state import GradientState, Vectors
from tfcommx.runtime.trial import STEPS, TrialExecutor, TrialRounds

TOPOLOGIES = [Topology(3, 1), Topology(2, 2)]


def plans(topology: Topology, operation: str = "sum", dtype: str = "float32") -> list[Plan]:
    """Return plain Horovod's plan and two sparse ones, with unlike buckets and shards."""
    schemes = [
        scheme("allreduce"),
        *(scheme(name, RULES[0], 0.1) for name in ("allgather", "hitopk")),
    ]
    return [plan_for(one, topology, operation, dtype) for one in schemes]


def kept(running: TrialExecutor) -> Vectors:
    """Return all that this rank has not sent yet."""
    return running.export().residuals


def stays(monkeypatch: pytest.MonkeyPatch, chosen: int) -> None:
    """Let this plan be chosen after all turns."""
    monkeypatch.setattr(TrialRounds, "_drop_hopeless", lambda self: None)
    monkeypatch.setattr(TrialRounds, "_choose", lambda self: chosen)


@pytest.mark.parametrize(("chosen", "topology"), drawn([0, 1, 2], TOPOLOGIES), ids=name_of)
def test_nothing_is_lost_whichever_plan_stays(
    topology: Topology, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, all results plus the residuals equal the sum of gradients, to the bit."""
    stays(monkeypatch, chosen)
    before = {"first/kernel": np.full(37 * 11, 0.25, np.float32)}

    def work(comm: Comm) -> list[tuple[dict, Vectors, int | None]]:
        running, log = TrialExecutor(plans(topology), comm), []
        state = GradientState({**before, "of another model": np.ones(3, np.float32)})
        assert running.load(state).variables == {"of another model"}
        for step in range(STEPS + 3):
            given = {path: tf.constant(one) for path, one in gradients(comm.rank, step).items()}
            result = running.exchange(given)
            sent = {path: one.numpy() for path, one in result.items()}
            log.append((sent, kept(running), running.rounds.chosen))
        return log

    ranks = ThreadComm.run(topology, work)
    came = {path: np.zeros(np.prod(shape)) for path, shape in SHAPES.items()}
    came["first/kernel"] += topology.size * 0.25
    sent = {path: np.zeros(np.prod(shape)) for path, shape in SHAPES.items()}
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        for path in SHAPES:
            results = [result[path].ravel() for result, _, _ in of_ranks]
            assert all((one == results[0]).all() for one in results)  # agreement
            came[path] += sum(gradients(rank, step)[path].ravel() for rank in range(topology.size))
            sent[path] += results[0]
            residual = sum(left.get(path, 0) for _, left, _ in of_ranks)
            np.testing.assert_array_equal(sent[path] + residual, came[path], f"{path}, {step}")
        assert [one for _, _, one in of_ranks] == [
            chosen if step >= STEPS - 1 else None
        ] * topology.size
    if chosen == 0:  # plain Horovod has sent the residuals of the other plans
        assert not any(left for _, left, _ in of_ranks)


def bytes_kept(running: TrialExecutor) -> int:
    """Return the bytes of all that this rank keeps for all plans, and outside of them."""
    states = [one for running in running.executors for one in running.states.values()]
    residuals = [one.residual for one in states if one.residual is not None]
    return sum(4 * int(tf.size(one)) for one in (*residuals, *running._unsent.values()))


@pytest.mark.parametrize("chosen", [case(0, kept=False), case(1, kept=False), 2])
def test_what_losing_plans_needed_is_freed(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once decided, and a step later: the residuals of the plan that stays, and nothing else."""
    stays(monkeypatch, chosen)
    topology = Topology(2, 2)

    def work(comm: Comm) -> list[int]:
        running, log = TrialExecutor(plans(topology), comm), []
        for step in range(STEPS + 1):
            given = {path: tf.constant(one) for path, one in gradients(comm.rank, step).items()}
            running.exchange(given)
            log.append(bytes_kept(running))
        return log

    # allgather keeps a residual of each entry, hitopk of this slot's half
    sizes = [4 * bucket.padded for bucket in plans(topology)[2].buckets if bucket.k is not None]
    of_plans = [0, 4 * (37 * 11 + 11 * 53), sum(sizes) // 2]
    for log in ThreadComm.run(topology, work):
        assert log[0] == log[STEPS - 2] == sum(of_plans)
        assert log[STEPS - 1] > of_plans[chosen]  # residuals are sent in the next step
        assert log[STEPS] == of_plans[chosen]


def test_two_trials_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stays(monkeypatch, 1)
    topology = Topology(2, 1)

    def work(comm: Comm) -> list[tuple[int, int]]:
        both, turns = [TrialExecutor(plans(topology), comm) for _ in range(2)], []
        for step in range(2 * STEPS + 6):
            given = {path: tf.constant(one) for path, one in gradients(comm.rank, step).items()}
            for one in both:
                one.exchange(given)
            turns.append(tuple(int(one._last) for one in both))
        assert all(one.rounds.chosen == 1 and one.rounds.steps == STEPS for one in both)
        return turns

    for turns in ThreadComm.run(topology, work):
        first, second = zip(*turns, strict=True)
        assert set(second[:STEPS]) == {0} and set(first[STEPS:]) == {1}
        tried = second[STEPS : 2 * STEPS]
        assert [tried.count(plan) for plan in range(3)] == 3 * [STEPS // 3]


def test_nobody_waits_for_a_trial_that_takes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is kept and not trained any more."""
    stays(monkeypatch, 2)
    topology = Topology(2, 1)

    def work(comm: Comm) -> list[int | None]:
        idle, running = (TrialExecutor(plans(topology), comm) for _ in range(2))
        chosen = []
        for step in range(3 * IDLE + STEPS):
            given = {path: tf.constant(one) for path, one in gradients(comm.rank, step).items()}
            if step < 4:
                idle.exchange(given)
            running.exchange(given)
            chosen.append(running.rounds.chosen)
        assert idle.rounds.chosen is None
        return chosen

    for chosen in ThreadComm.run(topology, work):
        assert chosen[-2] is None and chosen[-1] == 2


def test_gradients_that_are_not_finite_reach_all_and_enter_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A NaN in the very step that sends the residuals: they stay."""
    stays(monkeypatch, 0)
    topology = Topology(2, 1)

    def work(comm: Comm) -> tuple[Vectors, dict, Vectors]:
        running = TrialExecutor(plans(topology), comm)
        for step in range(STEPS):
            running.exchange(
                {path: tf.constant(one) for path, one in gradients(comm.rank, step).items()}
            )
        before = kept(running)
        bad = gradients(comm.rank, STEPS)
        if comm.rank == 1:
            bad["first/kernel"][:] = np.nan
        result = running.exchange({path: tf.constant(one) for path, one in bad.items()})
        return before, {path: one.numpy() for path, one in result.items()}, kept(running)

    for rank, (before, result, after) in enumerate(ThreadComm.run(topology, work)):
        assert np.isnan(result["first/kernel"]).all() and np.isfinite(result["last/kernel"]).all()
        assert before["first/kernel"].any()
        waits = before["first/kernel"] if rank == 1 else 0
        np.testing.assert_array_equal(after.get("first/kernel", 0), waits)


def test_float16_gradients_lose_nothing_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    stays(monkeypatch, 0)
    topology = Topology(2, 1)
    tiny = {"first/kernel": np.full(37 * 11, 2.0**-14, np.float32)}

    def work(comm: Comm) -> tuple[dict, Vectors]:
        running = TrialExecutor(plans(topology, dtype="float16"), comm)
        running.load(GradientState(tiny))
        ones = {path: tf.ones(shape, tf.float16) for path, shape in SHAPES.items()}
        return running.exchange(ones), running.unsent()

    for result, left in ThreadComm.run(topology, work):
        assert (result["first/kernel"].numpy() == 2).all()
        np.testing.assert_array_equal(left["first/kernel"], tiny["first/kernel"])


def test_what_is_cleared_is_forgotten_in_all_plans_and_outside_of_them() -> None:
    def work(comm: Comm) -> None:
        running = TrialExecutor(plans(comm.topology), comm)
        for step in range(3):
            running.exchange(
                {path: tf.constant(one) for path, one in gradients(comm.rank, step).items()}
            )
        before = kept(running)
        assert before.keys() == {"first/kernel", "last/kernel"}
        ones = {path: np.ones(np.prod(shape), np.float32) for path, shape in SHAPES.items()}
        for _ in range(2):
            running.load(GradientState(ones))
        running.clear({"first/kernel", "of another model"})
        left = kept(running)
        assert left.keys() == {"first/bias", "last/kernel"} and (left["first/bias"] == 2).all()
        np.testing.assert_array_equal(left["last/kernel"], before["last/kernel"] + 2)
        assert running.export({"first/bias"}).residuals.keys() == {"first/bias"}
        running.exchange({path: tf.zeros(shape) for path, shape in SHAPES.items()})
        assert not running.unsent()  # the next step sends them

    ThreadComm.run(Topology(2, 1), work)


def test_ranks_that_measure_differently_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest rank counts: rank 1 alone finds plain Horovod slow."""
    topology = Topology(2, 1)

    def work(comm: Comm) -> tuple[int | None, list[int]]:
        running, told = TrialExecutor(plans(topology)[:2], comm, lambda turns: told.append(1)), []
        for step in itertools.count():
            if running.rounds.chosen is not None:
                sent = [
                    routes.of(bucket).wire_bytes(bucket, topology)
                    for executor in running.executors
                    for bucket in executor.plan.buckets
                ]
                # Both plans had equally many turns; the times that ranks exchange do not count
                np.testing.assert_allclose(comm.traffic(), step / 2 * np.sum(sent, axis=0))
                return running.rounds.chosen, told
            running.exchange(
                {path: tf.constant(one) for path, one in gradients(comm.rank, step).items()}
            )

    clocks: dict[int, float] = {}

    def now(self: TrialExecutor, results: list[tf.Tensor]) -> tf.Tensor:
        rank, plan = self.comm.rank, int(self._last.numpy())
        clocks[rank] = clocks.get(rank, 0.0) + (0.01 if plan or rank == 0 else 0.014)
        return tf.constant(clocks[rank], tf.float64)

    monkeypatch.setattr(TrialExecutor, "_now", now)
    assert ThreadComm.run(topology, work) == [(1, [1]), (1, [1])]
