"""Who is next in a trial of plans, and which one stays: fixed times in, decision out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tfcommx.runtime.trial import STEPS, TrialRounds


def play(plans: int, seconds: Callable[[int, int], float]) -> tuple[TrialRounds, list[int]]:
    """Play rounds until a plan is chosen; `seconds(plan, step)`. Return also who had each turn."""
    rounds, taken = TrialRounds(plans), []
    while rounds.chosen is None:
        times = []
        for plan in rounds.order:
            times.append(seconds(plan, len(taken)))
            taken.append(plan)
        rounds.record(times)
    return rounds, taken


@pytest.mark.parametrize("plans", [2, 3])
def test_the_fastest_stays_after_at_most_so_many_steps(plans: int) -> None:
    for fastest in range(plans):
        rounds, taken = play(plans, lambda plan, _, best=fastest: 0.9 if plan == best else 1.0)
        assert rounds.chosen == fastest
        assert rounds.steps == len(taken) == STEPS
        assert {taken.count(plan) for plan in range(plans)} == {STEPS // plans}


def test_each_round_begins_with_another_plan() -> None:
    _, taken = play(3, lambda plan, _: 1.0)
    rounds = [taken[start : start + 3] for start in range(0, STEPS, 3)]
    assert all(sorted(one) == [0, 1, 2] for one in rounds)
    assert [one[0] for one in rounds] == [0, 1, 2, 0, 1, 2]


def test_the_first_use_does_not_count() -> None:
    """Opening connections may take seconds."""
    rounds, _ = play(3, lambda plan, step: 0.8 if plan == 1 else 1.0 + 10 * (step < 3))
    assert (rounds.chosen, rounds.mean(0)) == (1, 1.0)
    rounds, _ = play(3, lambda plan, step: (10.0 if step < 3 else 0.8) if plan == 1 else 1.0)
    assert rounds.chosen == 1


@pytest.mark.parametrize("share", [1.0, 0.98])
def test_plain_horovod_wins_ties_and_what_is_within_noise(share: float) -> None:
    rounds, _ = play(3, lambda plan, _: share if plan else 1.0)
    assert rounds.chosen == 0


def test_one_slow_step_decides_nothing_and_two_do() -> None:
    def hiccups(count: int, slow: int) -> int | None:
        rounds = TrialRounds(2)
        while rounds.chosen is None:
            counted = rounds.steps // 2 - 1
            seconds = [1.0, 0.9]
            # Not in the first rounds, after which a plan may be hopeless
            seconds[slow] += 5.0 * (3 <= counted < 3 + count)
            rounds.record([seconds[plan] for plan in rounds.order])
        return rounds.chosen

    assert [hiccups(count, 1) for count in (0, 1, 2)] == [1, 1, 0]
    assert [hiccups(count, 0) for count in (0, 1, 2)] == [1, 1, 1]


def test_a_machine_that_becomes_slower_changes_nothing() -> None:
    for factor, chosen in ((0.9, 1), (1.0, 0)):
        rounds, _ = play(2, lambda plan, step, f=factor: (f if plan else 1.0) * (1 + 0.002 * step))
        assert rounds.chosen == chosen


def test_noise_seldom_makes_a_slower_plan_win() -> None:
    """Of 500 trials with 10 % noise; of equal plans either may win."""
    numbers = np.random.default_rng(1)

    def won(plans: int, share: float) -> int:
        times = lambda plan, _: numbers.normal(share if plan else 1, 0.1)  # noqa: E731
        return sum(bool(play(plans, times)[0].chosen) for _ in range(500))

    assert won(3, 1.0) < 0.45 * 500
    assert won(2, 1.05) < 0.1 * 500
    assert won(3, 1.1) < 0.1 * 500
    assert won(2, 0.85) > 0.95 * 500


def test_what_is_within_the_standard_error_does_not_win() -> None:
    def chosen(spread: float) -> int | None:
        rounds = TrialRounds(2)
        while rounds.chosen is None:
            # In every round 10 % faster; the rounds differ
            slower = 1 + spread * (rounds.steps // 2 % 2)
            rounds.record([slower * (0.9 if plan else 1.0) for plan in rounds.order])
        return rounds.chosen

    assert [chosen(spread) for spread in (0.0, 0.1, 1.0)] == [1, 1, 0]


def test_a_hopelessly_slow_plan_takes_few_turns() -> None:
    rounds, taken = play(3, lambda plan, _: 5.0 if plan == 2 else 1.0 - 0.2 * plan)
    assert rounds.chosen == 1 and taken.count(2) == 3
    assert rounds.remaining == [0, 1] and len(taken) <= STEPS


def test_one_slow_step_makes_no_plan_hopeless() -> None:
    rounds, _ = play(2, lambda plan, step: 0.8 + 9 * (step == 3) if plan else 1.0)
    assert rounds.chosen == 1


def test_a_hopeless_plain_horovod_ends_the_trial_early() -> None:
    rounds, taken = play(2, lambda plan, _: 0.1 if plan else 1.0)
    assert rounds.chosen == 1 and len(taken) == 6
