"""TrialRounds: the order of plans in a trial, and the choice from their times.

    step    1 2 3 | 4 5 6 | 7 8 9 | 10 11 12 | ...  18
    plan    0 1 2 | 1 2 0 | 2 0 1 |  0  1  2 | ...
            first use     | a plan that is hopelessly slower takes no more turns
            does not count

Plan 0 is plain Horovod. In a round each plan has one step, each time in another order, so that a
machine that becomes slower, and what the ranks do between two rounds, weigh on all plans alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tfcommx.terms import PlanError

# Of the whole trial, at most; a round that would go beyond is not begun
STEPS = 18
# Rounds without which a trial says nothing: the first does not count
LEAST_ROUNDS = 4
# A plan takes no more turns if its fastest step takes this many times the median of the best plan,
# after so many rounds that count
HOPELESS, ROUNDS_BEFORE = 1.5, 2
# Plain Horovod stays unless the mean of another is at most this share of its own, and smaller by
# more than the standard error. With 4 ranks on 2 cores, whose steps differ by a fifth, five rounds
# so find a plan that is a fifth faster in 97 of 100 trials, and take one that is 5 % slower in 12;
# by the median, and asking for a faster step in all rounds but one, it was 93 and 22. Of normal
# times that differ by a fifth, eight rounds take a plan that is 10 % slower in 4 of 100 trials;
# without the standard error in 10.
CLEARLY = 0.96


class TrialRounds:
    """The state of a trial: equal on all ranks that record equal times.

    >>> rounds = TrialRounds(2)
    >>> while rounds.chosen is None:
    ...     rounds.record([0.2 if plan == 0 else 0.1 for plan in rounds.order])
    >>> rounds.chosen, rounds.mean(0)
    (1, 0.2)
    """

    def __init__(self, plans: int, steps: int = STEPS) -> None:
        """Begin a trial of so many plans, >= 2, that takes at most so many steps.

        **Raises:** PlanError for fewer steps than LEAST_ROUNDS rounds take.
        """
        if steps < LEAST_ROUNDS * plans:
            raise PlanError(
                f"A trial of {plans} plans takes at least {LEAST_ROUNDS * plans} steps. Received "
                f"{steps}."
            )
        self._most = steps
        # Plans that still take turns, ascending
        self.remaining = list(range(plans))
        # The plans of this round, in the order of their turns
        self.order = list(range(plans))
        # The plan that stays, once that is decided
        self.chosen: int | None = None
        # Steps taken
        self.steps = 0
        # Seconds of each plan's steps that count
        self._seconds: list[list[float]] = [[] for _ in range(plans)]
        self._rounds = 0

    def record(self, seconds: Sequence[float]) -> None:
        """Take the times of a round's steps, in the order of `order`; decide, or begin the next."""
        if self._rounds:
            for plan, taken in zip(self.order, seconds, strict=True):
                self._seconds[plan].append(taken)
        self.steps += len(self.order)
        self._rounds += 1
        if self._rounds > ROUNDS_BEFORE:
            self._drop_hopeless()
        if len(self.remaining) == 1 or self.steps + len(self.remaining) > self._most:
            self.chosen = self._choose()
        else:
            shift = self._rounds % len(self.remaining)
            self.order = self.remaining[shift:] + self.remaining[:shift]

    def mean(self, plan: int) -> float | None:
        """Return the mean seconds of a plan's steps, without the slowest; None if none counts.

        Other work on the machine makes steps slower, never faster; a plan that stalls more often
        than once shows it.
        """
        return statistics.fmean(self._kept(plan)) if self._seconds[plan] else None

    def _kept(self, plan: int) -> list[float]:
        taken = sorted(self._seconds[plan])
        return taken[:-1] or taken

    def _drop_hopeless(self) -> None:
        best = min(statistics.median(self._seconds[plan]) for plan in self.remaining)
        self.remaining = [
            plan for plan in self.remaining if min(self._seconds[plan]) <= HOPELESS * best
        ]

    def _choose(self) -> int:
        best = min(self.remaining, key=self._mean)
        if best == 0 or 0 not in self.remaining:
            return best
        plain, other = self._mean(0), self._mean(best)
        error = math.hypot(*(self._standard_error(plan) for plan in (0, best)))
        return best if other <= CLEARLY * plain and plain - other > error else 0

    def _standard_error(self, plan: int) -> float:
        """Of the mean; LEAST_ROUNDS leave two steps at least.

        It counts what differs from round to round, too: a trial on a machine whose speed changes
        says little, and plain Horovod stays.
        """
        kept = self._kept(plan)
        return statistics.stdev(kept) / math.sqrt(len(kept))

    def _mean(self, plan: int) -> float:
        found = self.mean(plan)
        assert found is not None  # Plans that remain have had their turns
        return found
