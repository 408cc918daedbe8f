"""How "auto" uses the expected length of a run: a trial, a clear prediction, or nothing."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Link, Links, Plan, PlanError, Scheme, Topology
from tfcommx.keras_internals.step import traced_batch
from tfcommx.optim import automatic
from tfcommx.optim.automatic import FEW, ExpectedRun, links_of
from tfcommx.planner.automatic import PlanRequest
from tfcommx.planner.plan import Gradient
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.trial import STEPS, TrialRounds
from tfcommx.strategies import Synchronous, strategy_of

TOPOLOGY, FOUR = Topology(2, 1), Topology(4, 1)
LAYERS = [Gradient(f"layer{number}/kernel", (256, 256), "float32") for number in range(2)]
SLOW = Links(Link(1e-6, 1e-7), Link(1e-6, 1e-7))
LOSSY = Scheme("auto", "mstopk", 0.01)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFCOMMX_CACHE", str(tmp_path / "kept"))


def begin(expected: ExpectedRun, scheme: Scheme, links: Links | None) -> Any:
    """Return the start of both ranks: (plans that take turns, steps of the trial) or one plan."""

    def work(comm: Comm) -> Any:
        asked = PlanRequest(LAYERS, comm.topology, links=links)
        found = automatic.executor_for({"*": scheme}, asked, comm, Synchronous(), expected)
        if isinstance(found, PlanExecutor):
            return found.plan
        return len(found.executors), found.rounds._most

    first, second = ThreadComm.run(TOPOLOGY, work)
    assert first == second
    return first


@pytest.mark.parametrize(
    ("steps", "plans", "most"),
    [(None, 3, STEPS), (10**6, 3, STEPS), (600, 3, 12), (599, 2, 11), (400, 2, 8)],
)
def test_a_trial_takes_at_most_2_percent_of_the_steps_that_follow(
    steps: int | None, plans: int, most: int
) -> None:
    assert begin(ExpectedRun(steps), LOSSY, SLOW) == (plans, most)


def test_where_no_trial_fits_a_clear_prediction_counts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = begin(ExpectedRun(399), LOSSY, SLOW)
    assert any(bucket.k is not None for bucket in plan.buckets)
    assert "by prediction. A trial takes 8 steps or more, and 2% of the 399" in caplog.text


def test_where_nothing_is_clear_it_is_plain_horovod(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfcommx.planner.automatic.CLEARLY_FASTER", 0.0)
    with caplog.at_level(logging.WARNING):
        plan = begin(ExpectedRun(399), LOSSY, SLOW)
    assert {(bucket.route, bucket.k) for bucket in plan.buckets} == {("allreduce", None)}
    assert "plain Horovod. A trial takes 8" in caplog.text


def test_between_assumed_links_nothing_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on nodes of unequal slots, whose links are not measured."""
    monkeypatch.setattr("tfcommx.planner.automatic.CLEARLY_FASTER", 1.0)
    monkeypatch.setattr(automatic, "links_of", lambda *_: None)
    plan = begin(ExpectedRun(399), LOSSY, None)
    assert {(bucket.route, bucket.k) for bucket in plan.buckets} == {("allreduce", None)}
    plan = begin(ExpectedRun(399), LOSSY, SLOW)
    assert any(bucket.k is not None for bucket in plan.buckets)


def test_by_links_whose_measurements_differ_nothing_is_clear() -> None:
    """A busy machine's links, with a spread of 3, put a run of 400 steps on a slower plan."""
    for spread, is_clear in ((0.25, True), (0.26, False), (3.0, False)):
        plan = begin(ExpectedRun(399), LOSSY, SLOW._replace(spread=spread))
        assert any(bucket.k is not None for bucket in plan.buckets) == is_clear


def test_links_whose_measurements_differ_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy, steady = SLOW._replace(spread=3.0), SLOW._replace(spread=0.1)
    measured = []

    def work(links: Links) -> list[Links | None]:
        monkeypatch.setattr(automatic, "probe", lambda *_, **__: SimpleNamespace(links=links))
        return ThreadComm.run(TOPOLOGY, links_of)

    for now in (noisy, steady, noisy):
        measured += work(now)
    assert measured == [noisy, noisy, steady, steady, steady, steady]


def test_links_measured_again_in_mid_run_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run took the links of a bad hour for usual, and saw no change in the next one."""
    first, slower = SimpleNamespace(links=SLOW), SimpleNamespace(links=SLOW._replace(engine_s=1.0))
    for found, again, expected in (
        (first, False, SLOW),
        (slower, True, slower.links),
        (slower, False, SLOW),
    ):
        monkeypatch.setattr(automatic, "probe", lambda *_, found=found, **__: found)
        links = ThreadComm.run(TOPOLOGY, lambda comm, again=again: links_of(comm, again=again))
        assert links == [expected, expected]


def test_in_a_few_steps_nothing_is_measured_or_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("too few steps for that")

    for name in ("propose", "probe"):
        monkeypatch.setattr(automatic, name, refuse)
    plan = begin(ExpectedRun(FEW - 1), LOSSY, None)
    assert {(bucket.route, bucket.k) for bucket in plan.buckets} == {("allreduce", None)}
    with pytest.raises((AssertionError, PlanError), match="too few"):  # On rank 0, on others
        begin(ExpectedRun(FEW), LOSSY, SLOW)


def decide(expected: ExpectedRun, scheme: Scheme = LOSSY) -> None:
    """Hold a trial in which all plans are equally fast, and decide it."""

    def work(comm: Comm) -> None:
        asked = PlanRequest(LAYERS, comm.topology, links=SLOW)
        trial = automatic.executor_for({"*": scheme}, asked, comm, Synchronous(), expected)
        turns = TrialRounds(len(trial.executors), expected.trial_steps)
        while turns.chosen is None:
            turns.record([1.0 for _ in turns.order])
        comm.gather_objects("all ranks have looked for a choice")
        trial._decided(turns)

    ThreadComm.run(TOPOLOGY, work)


def test_a_choice_is_used_again_until_a_longer_trial_fits() -> None:
    """Four rounds of two plans must not decide for a million steps."""
    told = ExpectedRun(400, batch=4)
    decide(told._replace(keeps_choice=False))
    assert begin(told, LOSSY, SLOW) == (2, 8)  # Nothing was kept
    decide(told)
    for steps in (449, 400, 399, FEW - 1):
        plan = begin(told._replace(steps=steps), LOSSY, SLOW)
        assert {(bucket.route, bucket.k) for bucket in plan.buckets} == {("allreduce", None)}
    assert begin(told._replace(steps=10**6), LOSSY, SLOW) == (3, STEPS)
    decide(told._replace(steps=10**6))
    assert begin(told._replace(steps=10**6), LOSSY, SLOW) == plan
    assert begin(told._replace(steps=10**6, batch=8), LOSSY, SLOW) == (3, STEPS)


@pytest.mark.parametrize(("what", "where"), [("read", automatic), ("propose", automatic)])
def test_what_fails_on_rank_0_alone_fails_on_all_ranks(
    what: str, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it."""

    def work(comm: Comm) -> None:
        asked = PlanRequest(LAYERS, comm.topology, links=SLOW)
        with pytest.raises(OSError if comm.rank == 0 else PlanError, match="disk"):
            automatic.executor_for({"*": LOSSY}, asked, comm, Synchronous(), ExpectedRun())

    def fails(*_: Any) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(where, what, fails)
    ThreadComm.run(TOPOLOGY, work)


@pytest.mark.parametrize(("rows", "expected"), [(16, 8), (15, None)])
def test_the_batch_of_fit_is_known_where_all_batches_are_alike(
    rows: int, expected: int | None
) -> None:
    found: list[int | None] = []

    class Seen(keras.optimizers.SGD):
        def apply(self, *given: Any, **more: Any) -> Any:
            found.append(traced_batch())
            return super().apply(*given, **more)

    net = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    net.compile(Seen(0.1), loss="mse", jit_compile=False)
    net.fit(np.ones((rows, 4)), np.ones((rows, 1)), batch_size=8, verbose=0)
    assert found == [expected]


def test_the_batch_of_a_loop_is_that_of_its_first_input() -> None:
    found: list[int | None] = []
    step = tf.function(lambda rate, x: found.append(traced_batch()), autograph=False)
    step(tf.constant(0.1), tf.ones([8, 4]))
    step(tf.constant(0.1), tf.ones([16, 4]))
    assert found == [8, 16] and traced_batch() is None


BUDGET = Scheme("auto", budget=0.3)


@pytest.mark.parametrize(("steps", "plans"), [(None, 2), (400, 2), (399, 1), (FEW - 1, 1)])
def test_within_a_budget_no_run_is_too_short_and_plain_horovod_takes_no_part(
    steps: int | None, plans: int
) -> None:
    found = within_budget(ExpectedRun(steps), BUDGET)
    assert len(found) == plans
    assert {bucket.wire for plan in found for bucket in plan.buckets} == {"int8"}


def within_budget(
    expected: ExpectedRun,
    scheme: Scheme,
    layers: list[Gradient] = LAYERS,
    topology: Topology = FOUR,
    **known: Any,
) -> list[Plan]:
    """Return the plans that take turns, or the one that was chosen: equal on all ranks."""

    def work(comm: Comm) -> list[Plan]:
        asked = PlanRequest(layers, comm.topology, **({"links": SLOW} | known))
        return automatic.executor_for({"*": scheme}, asked, comm, Synchronous(), expected).plans

    first, *others = ThreadComm.run(topology, work)
    assert all(one == first for one in others)
    return first


def test_a_budget_binds_few_gradients_too_and_measures_nothing_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is tried")

    monkeypatch.setattr(automatic, "links_of", refuse)
    small = [Gradient("kernel", (64, 64), "float32")]
    (plan,) = within_budget(ExpectedRun(), BUDGET, small, links=None)
    assert {bucket.wire for bucket in plan.buckets} == {"int8"}
    (plan,) = within_budget(ExpectedRun(), dataclasses.replace(BUDGET, budget=0.04), small)
    assert {bucket.wire for bucket in plan.buckets} == {"int1"}


def test_a_choice_within_a_budget_is_not_taken_for_another_momentum() -> None:
    tight = dataclasses.replace(BUDGET, budget=0.05)
    decide(told := ExpectedRun(400, batch=4), tight)
    (plan,) = within_budget(told, tight, topology=TOPOLOGY)
    assert {bucket.wire for bucket in plan.buckets} == {"int1"}
    for plan in within_budget(told, tight, topology=TOPOLOGY, has_momentum=True):
        assert {bucket.wire for bucket in plan.buckets} == {"elias/int4"}


def test_a_budget_that_nothing_fits_is_refused_on_all_ranks() -> None:
    def work(comm: Comm) -> str:
        asked = PlanRequest(LAYERS, comm.topology, links=SLOW)
        with pytest.raises(PlanError, match=r"budget=1e-05.*mstopk 0\.001.*OneBitAdam") as refused:
            schemes = {"*": dataclasses.replace(BUDGET, budget=1e-5)}
            automatic.executor_for(schemes, asked, comm, Synchronous(), ExpectedRun())
        return str(refused.value)

    assert len(set(ThreadComm.run(TOPOLOGY, work))) == 1


def test_a_budget_needs_ranks_that_exchange_gradients_in_each_step() -> None:
    def work(comm: Comm) -> None:
        asked = PlanRequest(LAYERS, comm.topology, links=SLOW)
        with pytest.raises(PlanError, match=r"budget=0\.3.*Root"):
            automatic.executor_for({"*": BUDGET}, asked, comm, strategy_of("root"), ExpectedRun())

    ThreadComm.run(TOPOLOGY, work)
