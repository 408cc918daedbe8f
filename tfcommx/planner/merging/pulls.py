"""Pulls: which layers' weights are gathered together before and during the forward pass.

Batches of consecutive layers are gathered one after another; a layer is computed when the layers
before it are and its own batch has arrived. Layers 1 to 5 in the batches [1, 2], [3, 4], [5]:

    port      | T_s  T1 T2 | T_s  T3 T4 | T_s  T5 |
    compute                | C1 | C2 |  | C3 | C4 | C5 |
                                                       finish

Many batches cost start-up times, few cost overlap.

Source: Wang, Pi, Zhou, "Scalable Distributed DL Training: Batching Communication and Computation"
(2019): `from_first` is Algorithm 1, `from_last` Algorithm 2, `execution_s` equation 4; `ibatch` is
the paper's choice between the two. Both are greedy and equation 4 holds under constraint 5 only, so
`optimal` solves the drawing above exactly. `finish_s` is the drawing.

Points that the paper leaves open, and their treatment here:
- Ties: the first candidate in ascending order of (l1, l2) and of l_k in Algorithm 1, in descending
  order of (l_(N-1), l_(N-2)) and of l_k in Algorithm 2.
- Step one: l1 < l2 <= L, so there are at least two batches, and l_(N-2) may be 0. If no pair meets
  constraint 5, or there is one layer, all layers are one batch.
- Later steps: if no candidate meets constraint 5, all layers that remain are one batch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfcommx.core import PlanError

# Batches that finish later by this factor count as equally good: predictions are no better.
AS_GOOD = 1.02
# The layers of each batch, numbered from 0: [start, stop).
Batches = list[tuple[int, int]]


@dataclass(frozen=True)
class PullTimes:
    """The times of a model's layers, in forward order.

    >>> times = PullTimes(startup_s=0.1, transfer_s=(1.0, 2.0), compute_s=(3.0, 1.0))
    >>> times.layers
    2
    """

    # Seconds that a gather takes however little it carries, >= 0: T_s of the paper
    startup_s: float
    # Seconds that each layer's weights add to a gather, >= 0: T_t
    transfer_s: tuple[float, ...]
    # Seconds of each layer's forward pass, >= 0: C
    compute_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.transfer_s) != len(self.compute_s):
            raise PlanError(
                "Each layer needs a time of its transfer and one of its forward pass. Received "
                f"{len(self.transfer_s)} and {len(self.compute_s)} times."
            )
        for seconds in (self.startup_s, *self.transfer_s, *self.compute_s):
            # NaN fails this comparison, and would pass one with < 0
            if not 0 <= seconds < math.inf:
                raise PlanError(f"Times must be seconds >= 0. Received {seconds!r}.")

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.transfer_s)

    def pull_s(self, start: int, stop: int) -> float:
        """Return the seconds of gathering the layers [start, stop) together."""
        return self.startup_s + sum(self.transfer_s[start:stop])

    def forward_s(self, start: int, stop: int) -> float:
        """Return the seconds of computing the layers [start, stop)."""
        return sum(self.compute_s[start:stop])


def finish_s(batches: Batches, times: PullTimes) -> float:
    """Return when the forward pass has ended, as drawn above.

    >>> times = PullTimes(1.0, (1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    >>> finish_s([(0, 3)], times), finish_s([(0, 1), (1, 3)], times)
    (10.0, 9.0)
    """
    port = computed = 0.0
    for start, stop in batches:
        port += times.pull_s(start, stop)
        computed = max(computed, port) + times.forward_s(start, stop)
    return computed


def execution_s(batches: Batches, times: PullTimes) -> float:
    """Return the paper's equation 4: all gathers, then the forward pass of the last batch.

    It is `finish_s` if no gather ends before the forward pass of the batch before it (constraint
    5), and too short otherwise.
    """
    return sum(times.pull_s(*batch) for batch in batches) + times.forward_s(*batches[-1])


def at_once(times: PullTimes) -> Batches:
    """Put all layers into one batch: no overlap, one start-up time. The default PS of the paper."""
    return [(0, times.layers)] if times.layers else []


def layer_by_layer(times: PullTimes) -> Batches:
    """Put each layer into a separate batch: most overlap, most start-up times."""
    return [(layer, layer + 1) for layer in range(times.layers)]


def from_first(times: PullTimes) -> Batches:
    """Choose batches from the first layer on: Algorithm 1.

    Of the pairs (l1, l2) whose second gather covers the first batch's computation, the one with the
    longest such computation, then the shortest first gather; after that each gather is the shortest
    that covers the computation of the batch before.

    **Cost:** O(L^2) sums, L the number of layers.
    """
    count = times.layers
    pairs = [
        (first, second)
        for first in range(1, count)
        for second in range(first + 1, count + 1)
        if times.pull_s(first, second) >= times.forward_s(0, first)
    ]
    if not pairs:
        return at_once(times)
    first, second = min(pairs, key=lambda p: (-times.forward_s(0, p[0]), times.pull_s(0, p[0])))
    ends = [0, first, second]
    while ends[-1] < count:
        covered = times.forward_s(ends[-2], ends[-1])
        covering = [
            x for x in range(ends[-1] + 1, count + 1) if times.pull_s(ends[-1], x) >= covered
        ]
        # A longer gather never takes less: the first that covers is the shortest.
        ends.append(covering[0] if covering else count)
    return list(itertools.pairwise(ends))


def from_last(times: PullTimes) -> Batches:
    """Choose batches from the last layer back: Algorithm 2.

    Of the pairs (l_(N-1), l_(N-2)) whose last gather covers the computation of the batch before,
    the one with the longest such computation, then the shortest computation of the last batch;
    after that each batch's computation is the longest that the next gather covers.

    **Cost:** O(L^2) sums, L the number of layers.
    """
    count = times.layers
    pairs = [
        (last, before)
        for last in range(count - 1, 0, -1)
        for before in range(last - 1, -1, -1)
        if times.pull_s(last, count) >= times.forward_s(before, last)
    ]
    if not pairs:
        return at_once(times)
    last, before = min(
        pairs, key=lambda p: (-times.forward_s(p[1], p[0]), times.forward_s(p[0], count))
    )
    starts = [count, last, before]
    while starts[-1] > 0:
        stop = starts[-1]
        gather = times.pull_s(stop, starts[-2])
        covered_starts = [x for x in range(stop - 1, -1, -1) if gather >= times.forward_s(x, stop)]
        longest = max((times.forward_s(x, stop) for x in covered_starts), default=0.0)
        chosen = [x for x in covered_starts if times.forward_s(x, stop) == longest]
        starts.append(chosen[0] if chosen else 0)
    return list(itertools.pairwise(reversed(starts)))


def ibatch(times: PullTimes) -> Batches:
    """Return the paper's choice: of the two greedy algorithms' batches those of less equation 4.

    Algorithm 1's if equal. Where a case was undefined, equation 4 may prefer the slower one.

    >>> times = PullTimes(1.0, (1.0,) * 5, (2.5, 3.0, 1.0, 1.0, 1.0))
    >>> from_first(times), from_last(times)
    ([(0, 1), (1, 3), (3, 5)], [(0, 1), (1, 2), (2, 5)])
    >>> ibatch(times), optimal(times)
    ([(0, 1), (1, 3), (3, 5)], [(0, 1), (1, 2), (2, 4), (4, 5)])
    """
    if not times.layers:
        return []
    return min(from_first(times), from_last(times), key=lambda batches: execution_s(batches, times))


def optimal(times: PullTimes) -> Batches:
    """Return the batches that finish first; of equals those with the fewest gathers.

    The gather of batch n that ends at layer j is done at n T_s + T(1..j), however the layers before
    are batched. So the earliest finish of the layers 1..j in n batches is

        F(n, j) = min over i of max(F(n - 1, i), n T_s + T(1..j)) + C(i+1..j)

    **Cost:** O(L^3) for L layers. Not a solver of the paper; exact.
    """
    count = times.layers
    if not count:
        return []
    transfer = [0.0, *itertools.accumulate(times.transfer_s)]
    compute = [0.0, *itertools.accumulate(times.compute_s)]
    finish = [0.0] + [math.inf] * count
    # By number of batches, then by last layer: the first layer of the last batch
    begins: list[list[int]] = []
    best, fewest = math.inf, 0
    for number in range(1, count + 1):
        before, finish = finish, [math.inf] * (count + 1)
        begins.append([0] * (count + 1))
        for stop in range(number, count + 1):
            arrival_s = number * times.startup_s + transfer[stop]
            finish[stop], begins[-1][stop] = min(
                (max(before[start], arrival_s) + compute[stop] - compute[start], start)
                for start in range(number - 1, stop)
            )
        if finish[count] < best:
            best, fewest = finish[count], number
    ends = [count]
    for begin in reversed(begins[:fewest]):
        ends.append(begin[ends[-1]])
    return list(itertools.pairwise(reversed(ends)))


# Name -> solver
PULLS: dict[str, Callable[[PullTimes], Batches]] = {
    "at_once": at_once,
    "layers": layer_by_layer,
    "from_first": from_first,
    "from_last": from_last,
    "ibatch": ibatch,
    "optimal": optimal,
}


@dataclass(frozen=True)
class PullChoice:
    """The choice, and the paper's own choice."""

    # Name of the solver in PULLS
    solver: str
    batches: tuple[tuple[int, int], ...]
    # Seconds until the forward pass has ended
    finish_s: float
    # Seconds with the paper's choice, `ibatch`
    ibatch_finish_s: float


def choose(times: PullTimes, solvers: Sequence[str] = tuple(PULLS)) -> PullChoice:
    """Take the solver whose batches finish first; `ibatch` is shown for comparison.

    `layers`, if it is among them and finishes at most 2 % later, is taken before all others: the
    times of gathers are known less well than that, and larger gathers tend to take longer than in
    proportion (docs/laboratory/strategies.md).

    >>> choose(PullTimes(1.0, (1.0, 1.0, 1.0), (2.0, 2.0, 2.0))).batches
    ((0, 1), (1, 2), (2, 3))

    Args:
        solvers: names in PULLS; of equals the one with the fewest gathers, then the first.
    """
    choices = [(name, PULLS[name](times)) for name in solvers]
    name, batches = min(choices, key=lambda choice: (finish_s(choice[1], times), len(choice[1])))
    single = layer_by_layer(times)
    if "layers" in solvers and finish_s(single, times) <= AS_GOOD * finish_s(batches, times):
        name, batches = "layers", single
    return PullChoice(
        name, tuple(batches), finish_s(batches, times), finish_s(ibatch(times), times)
    )
