"""The merging with the shortest step: dynamic programming over (compute delay, port free) states.

After position j every grouping of the earlier gradients is one point; only those on the lower left
border can lead to the shortest step, because both times only grow:

    port free
      |  x
      |     .  x          x  kept: neither is reached earlier at both times
      |  .    .           .  dominated
      |        .   x
      +----------------- delay of the backward pass by selection

The delay is 0 where nothing is selected, so one point is kept. With a separate stream for the
selection, the first coordinate is the time at which that stream is free.

Source: dynamic programming with dominance; the objective is equations 17 and 18 of Shi et al.,
"Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs"
(2020), with any prices. Their Algorithm 1 does not always reach it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from tfcommx.core import Profile
from tfcommx.planner.merging.heuristics import each, mg_wfbp, omgs, single
from tfcommx.planner.merging.merging import Groups, Prices, Seconds, finish_s, ready_times

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
# Two sums of the same seconds in another order differ by less, relatively.
ROUNDING = 1e-12
# Sizes at which bounds of a price are known, for each factor of 2.
STEPS = 512
# Weights of the bounds, from all on the backward pass to all on the port.
WEIGHTS = 21
# States kept after a position: in a coarse search, and at most.
BORDERS = (8, 32)


def optimal(profile: Profile, prices: Prices) -> Groups:
    """Return groups with the smallest `finish_s`, to rounding.

    It is the optimum of `simulator.step.simulate` on one stream of gradients without contention
    and spread, if a longer message never costs less. Where more than 32 states are kept after
    a position (hundreds of gradients, an exact selection on the compute stream and messages
    that need tens of milliseconds each), 32 of them are followed: then it is exact only up to
    the distance between two of these.

    **Cost:** for 500 gradients a few seconds at most; some thousand prices.
    """
    if not profile.variables:
        return []
    # Greedy choices first, because the best of them is a limit that ends most branches of the
    # search
    tried = [greedy(profile, prices) for greedy in (single, each, mg_wfbp, omgs)]
    best = min(tried, key=lambda groups: finish_s(groups, profile, prices))
    limit = finish_s(best, profile, prices)
    bounds = _Bounds(profile, prices)
    # A coarse search first: a good limit makes the other one short
    for border in BORDERS:
        groups = _Search(bounds, limit, border).groups()
        # A search that drops states may end without any within the limit, and the best so far stays
        if groups and finish_s(groups, profile, prices) <= limit:
            best, limit = groups, finish_s(groups, profile, prices)
    return best


def _border(first: Floats, port: Floats) -> Integers:
    """Return the positions of the states of which no other one is as early at both times."""
    # In ascending order of one time, so that a state is on the border if no state before it is as
    # early at the other
    order = np.lexsort((port, first))
    smallest = np.minimum.accumulate(port[order])
    is_on_border = np.ones(len(order), bool)
    # Equal but for rounding is dominated, because otherwise equal states would multiply
    is_on_border[1:] = port[order][1:] < smallest[:-1] * (1 - ROUNDING)
    positions: Integers = order[is_on_border]
    return positions


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


class _Bounds:
    """The least cost of the gradients after a position, over all groupings."""

    def __init__(self, profile: Profile, prices: Prices) -> None:
        self.ready, self.beside = ready_times(profile), prices.selection_on == "beside"
        self.ends = np.cumsum([0, *(row.size for row in profile.variables)])
        self.backward = profile.backward_s
        smallest = min((row.size for row in profile.variables if row.size), default=1)
        self.message = _Bounded(prices.message_s, smallest, int(self.ends[-1]))
        self.selection = _Bounded(prices.selection_s, smallest, int(self.ends[-1]))
        # With a separate stream, selections delay nothing: the port alone counts
        self.weights = np.ones(1) if self.beside else np.linspace(0, 1, WEIGHTS)
        self.rest = self._rest()

    # The step ends with the port, after all remaining messages, and it ends with the last message,
    # after the backward pass, its delay and all remaining selections. So it is no shorter than any
    # mean of both, and the smallest mean over all groupings is a sum over groups: one dynamic
    # program for each weight
    def _rest(self) -> Floats:
        count, port = len(self.ready), self.weights[:, None]
        bounds = np.zeros((len(self.weights), count + 1))
        for start in reversed(range(count)):
            sizes = self.ends[start + 1 :] - self.ends[start]
            sent, selected = self.message.bounds(sizes)[0], self.selection.bounds(sizes)[0]
            costs = port * sent + (1 - port) * selected + bounds[:, start + 1 :]
            # The last message follows the backward pass whole
            costs[:, -1] += (1 - port[:, 0]) * sent[-1]
            bounds[:, start] = costs.min(axis=1)
        return bounds

    def end(self, first: Floats, port: Floats, stop: int) -> Floats:
        """Return a lower bound of the end of a step in these states after position `stop`."""
        if stop == len(self.ready):
            return port if self.beside else np.maximum(port, self.backward + first)
        weights = self.weights[:, None]
        means = weights * port + (1 - weights) * (self.ready[-1] + first)
        bounds: Floats = (means + self.rest[:, stop, None]).max(axis=0)
        return bounds


class _Search:
    """Extends the kept states of all earlier positions by one group, position by position."""

    def __init__(self, bounds: _Bounds, limit: float, border: int) -> None:
        self.bounds, self.border = bounds, border
        self.ready, self.beside, self.ends = bounds.ready, bounds.beside, bounds.ends
        self.message, self.selection = bounds.message, bounds.selection
        # A state that is kept for an equal one may be later by as much for each position
        self.limit = limit * (1 + 1000 * ROUNDING)
        # For every kept state: position after its last group, both times, the state before it
        self.position: Integers = np.zeros(1, np.int64)
        self.first: Floats = np.zeros(1)
        self.port: Floats = np.zeros(1)
        self.before: Integers = np.full(1, -1)

    def groups(self) -> Groups:
        """Return the best groups; none if no state within the limit is left at the end."""
        count = len(self.ready)
        for stop in range(1, count + 1):
            self._extend(stop)
        last = np.flatnonzero(self.position == count)
        if not len(last):
            return []
        delay = 0.0 if self.beside else self.first[last]
        state = int(last[np.argmin(np.maximum(self.port[last], self.bounds.backward + delay))])
        groups: Groups = []
        while state:
            previous = int(self.before[state])
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
        # By bounds first, because exact prices are computed one by one
        candidates = np.flatnonzero(self._promising(lows, highs, stop))
        # States after one position share the group, and its price is computed once
        starts, which = np.unique(self.position[candidates], return_inverse=True)
        lengths = (self.ends[stop] - self.ends[starts]).tolist()
        selected = np.array([self.selection(size) for size in lengths], np.float64)[which]
        sent = np.array([self.message(size) for size in lengths], np.float64)[which]
        first, port = self._times(
            self.first[candidates], self.port[candidates], stop, selected, sent
        )
        indices = _border(first, port)
        indices = indices[self.bounds.end(first[indices], port[indices], stop) <= self.limit]
        if len(indices) > self.border:
            # Evenly spread over the border, so that states that are early at either time stay
            indices = indices[np.linspace(0, len(indices) - 1, self.border).astype(int)]
        self.position = np.append(self.position, np.full(len(indices), stop))
        self.first = np.append(self.first, first[indices])
        self.port = np.append(self.port, port[indices])
        self.before = np.append(self.before, candidates[indices])

    def _times(
        self, first: Floats, port: Floats, stop: int, selected: Floats, sent: Floats
    ) -> tuple[Floats, Floats]:
        """Return both times after a group that ends before `stop`."""
        ready = self.ready[stop - 1]
        # Times that are earlier than the next group can use are moved there: so more are equal
        following = self.ready[stop] if stop < len(self.ready) else 0.0
        if self.beside:
            start = np.maximum(first, ready) + selected
            port = np.maximum(port, start) + sent
            return np.maximum(start, following), np.maximum(port, following)
        delay = first + selected
        return delay, np.maximum(np.maximum(port, ready + delay) + sent, following + delay)

    def _promising(
        self, lows: tuple[Floats, Floats], highs: tuple[Floats, Floats], stop: int
    ) -> NDArray[np.bool_]:
        """Return True for each state that is not certainly dominated and not certainly too late."""
        order = np.argsort(highs[0], kind="stable")
        smallest = np.minimum.accumulate(highs[1][order])
        places = np.searchsorted(highs[0][order], lows[0], side="right") - 1
        beaten = np.where(places >= 0, smallest[np.maximum(places, 0)], np.inf)
        end = self.bounds.end(lows[0], lows[1], stop)
        promising: NDArray[np.bool_] = (lows[1] <= beaten) & (end <= self.limit)
        return promising
