"""The merging with the shortest step: dynamic programming over (compute delay, port free) states.

After position j every way of grouping what came before is one point; only those on the lower left
border can lead to the shortest step, because both times only ever add:

    port free
      |  x
      |     .  x          x  kept: neither is reached earlier at both times
      |  .    .           .  dominated
      |        .   x
      +----------------- delay of the backward pass by selection

The delay is 0 where nothing is selected, so one point is kept. With a stream beside for the
selection, the first coordinate is the time at which that stream is free.

Source: dynamic programming with dominance; what it minimizes is equations 17 and 18 of Shi et al.,
"Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs"
(2020), with any prices. Their Algorithm 1 does not always reach it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfcommx.planner.merging import each, mg_wfbp, omgs, single
from tfcommx.planner.merging.base import Groups, Prices, Seconds, finish_s, ready_times
from tfcommx.terms import Profile

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
# Two sums of the same seconds in another order differ by less, relatively.
ROUNDING = 1e-12
# Sizes at which bounds of a price are known, for each factor of 2.
STEPS = 512


class Optimal:
    """The exact optimum of the simulated step over all merges of consecutive gradients."""

    name = "optimal"
    needs_times = True

    def groups(self, profile: Profile, prices: Prices) -> Groups:
        """Return groups with the smallest `finish_s`, to rounding.

        It is the optimum of `simulator.step.simulate` on one stream of gradients without contention
        and spread, if a longer message never costs less.

        **Cost:** for 500 gradients about a second; some thousand prices.
        """
        if not profile.variables:
            return []
        simple = (single.SOLVER, each.SOLVER, mg_wfbp.SOLVER, omgs.SOLVER)
        tried = [solver.groups(profile, prices) for solver in simple]
        limit = min(finish_s(groups, profile, prices) for groups in tried)
        return _Search(profile, prices, limit).groups()


# Both times after a group, and the number of the state before it.
_State = tuple[float, float, int]


def _dominated(kept: list[_State], first: float, port: float) -> bool:
    """Tell whether one of the states is as early at both times, to rounding."""
    first, port = first * (1 + ROUNDING), port * (1 + ROUNDING)
    return any(one[0] <= first and one[1] <= port for one in kept)


class _Bounded:
    """A price that rises with the size: bounds for many sizes at once, exact values one by one."""

    def __init__(self, price: Seconds, smallest: int, largest: int) -> None:
        self.price = price
        self.known: dict[int, float] = {}
        count = int(STEPS * math.log2(2 * largest / smallest)) if largest else 0
        steps = np.geomspace(smallest, max(largest, 1), count)
        self.sizes = np.unique(np.concatenate([[0], steps.astype(np.int64), [largest]]))
        self.values = np.array([self(int(size)) for size in self.sizes], np.float64)

    def __call__(self, size: int) -> float:
        if size not in self.known:
            self.known[size] = self.price(size)
        return self.known[size]

    def bounds(self, sizes: Integers) -> tuple[Floats, Floats]:
        above = np.searchsorted(self.sizes, sizes)
        exact = self.sizes[above] == sizes
        below = np.where(exact, above, above - 1)
        return self.values[below], self.values[above]


class _Search:
    """Extends the kept states of all earlier positions by one group, position by position."""

    def __init__(self, profile: Profile, prices: Prices, limit: float) -> None:
        self.ready, self.beside = ready_times(profile), prices.selection_on == "beside"
        self.ends = np.cumsum([0, *(row.size for row in profile.variables)])
        self.backward = profile.backward_s
        smallest = min((row.size for row in profile.variables if row.size), default=1)
        self.message = _Bounded(prices.message_s, smallest, int(self.ends[-1]))
        self.selection = _Bounded(prices.selection_s, smallest, int(self.ends[-1]))
        # A state that is kept for an equal one may be later by as much for each position
        self.limit = limit * (1 + 1000 * ROUNDING)
        # Of every kept state: position after its last group, both times, the state before it
        self.position: Integers = np.zeros(1, np.int64)
        self.first: Floats = np.zeros(1)
        self.port: Floats = np.zeros(1)
        self.before = [-1]

    def groups(self) -> Groups:
        count = len(self.ready)
        for stop in range(1, count + 1):
            self._extend(stop)
        last = np.flatnonzero(self.position == count)
        delay = 0.0 if self.beside else self.first[last]
        state = int(last[np.argmin(np.maximum(self.port[last], self.backward + delay))])
        groups: Groups = []
        while state:
            previous = self.before[state]
            groups.append(list(range(self.position[previous], self.position[state])))
            state = previous
        return groups[::-1]

    def _extend(self, stop: int) -> None:
        """Add the states in which a group ends before position `stop`."""
        sizes = self.ends[stop] - self.ends[self.position]
        lows, highs = (
            self._times(self.first, self.port, stop, selected, sent)
            for selected, sent in zip(
                self.selection.bounds(sizes), self.message.bounds(sizes), strict=True
            )
        )
        candidates = np.flatnonzero(self._promising(lows, highs, stop))
        kept: list[_State] = []
        for state in candidates[np.argsort(lows[1][candidates], kind="stable")].tolist():
            # By exact prices it may be dominated, though by bounds it was not
            if not _dominated(kept, float(lows[0][state]), float(lows[1][state])):
                size = int(sizes[state])
                times = float(self.first[state]), float(self.port[state])
                found = (
                    *self._times(*times, stop, self.selection(size), self.message(size), max),
                    state,
                )
                if not _dominated(kept, found[0], found[1]):
                    kept = [one for one in kept if not _dominated([found], one[0], one[1])]
                    kept.append(found)
        kept.sort()
        self.position = np.append(self.position, np.full(len(kept), stop))
        self.first = np.append(self.first, [first for first, _, _ in kept])
        self.port = np.append(self.port, [port for _, port, _ in kept])
        self.before += [state for _, _, state in kept]

    def _times(
        self,
        first: Any,
        port: Any,
        stop: int,
        selected: Any,
        sent: Any,
        larger: Callable[[Any, Any], Any] = np.maximum,
    ) -> tuple[Any, Any]:
        """Return both times after a group that ends before `stop`, of one state or of many.

        Times that are earlier than the next group can use are moved there: so more are equal.
        """
        ready = self.ready[stop - 1]
        following = self.ready[stop] if stop < len(self.ready) else 0.0
        if self.beside:
            start = larger(first, ready) + selected
            return larger(start, following), larger(larger(port, start) + sent, following)
        delay = first + selected
        return delay, larger(larger(port, ready + delay) + sent, following + delay)

    def _promising(
        self, lows: tuple[Floats, Floats], highs: tuple[Floats, Floats], stop: int
    ) -> NDArray[np.bool_]:
        """Tell which states may be kept: not certainly dominated, and not certainly too late."""
        order = np.argsort(highs[0], kind="stable")
        smallest = np.minimum.accumulate(highs[1][order])
        places = np.searchsorted(highs[0][order], lows[0], side="right") - 1
        beaten = np.where(places >= 0, smallest[np.maximum(places, 0)], np.inf)
        end = lows[1]
        if not self.beside:
            end = np.maximum(end, self.backward + lows[0])
        found: NDArray[np.bool_] = (lows[1] <= beaten) & (end <= self.limit)
        return found


SOLVER = Optimal()
