"""Deal work out to ranks evenly."""

from __future__ import annotations

from collections.abc import Sequence


def balance(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each item: the longest first, each to the rank that has least so far.

    >>> balance([6, 4, 3, 1], ranks=2)
    [0, 1, 1, 0]

    Args:
        costs: of the items, > 0.
        ranks: >= 1; of those that have equally little the first.

    **Source:** Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): the rank that has most
    has at most 4/3 of what it has in the best partition.
    """
    owners, loads = [0] * len(costs), [0.0] * ranks
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += costs[place]
    return owners
