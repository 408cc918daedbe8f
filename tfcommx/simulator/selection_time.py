"""How long selecting from a vector takes, as a function of its entries: by formula, or measured."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from tfcommx.terms import PlanError, Profile

# Entries of a vector -> seconds of selecting from it.
SelectionTime = Callable[[int], float]


def sorting_time(gamma: float, density: float = 1.0) -> SelectionTime:
    """Return the time of an exact selection: gamma density d log2 d for d entries.

    >>> sorting_time(1e-3, density=0.5)(1024)
    5.12

    Source: Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient
    Sparsification on GPUs" (2020), equation 10. The base of its logarithm is not stated; the
    authors' code has 2, and no density.
    """
    return lambda entries: gamma * density * entries * math.log2(entries) if entries > 1 else 0.0


def interpolated_time(points: Sequence[tuple[int, float]]) -> SelectionTime:
    """Return the curve through measured (entries, seconds).

    It is linear between two points; before the first and after the last one it is proportional.

    >>> curve = interpolated_time([(100, 1.0), (200, 3.0)])
    >>> curve(150), curve(400)
    (2.0, 6.0)

    **Raises:** PlanError without any point.
    """
    known = sorted(dict(points).items())
    if not known or known[0][0] < 1:
        raise PlanError(f"Times of vectors of >= 1 entry are required. Received {list(points)}.")
    sizes = [size for size, _ in known]

    def seconds(entries: int) -> float:
        place = bisect.bisect_left(sizes, entries)
        if place in (0, len(known)):
            size, time = known[min(place, len(known) - 1)]
            return time * entries / size
        (low, low_time), (high, high_time) = known[place - 1], known[place]
        return low_time + (high_time - low_time) * (entries - low) / (high - low)

    return seconds


def measured_time(profile: Profile) -> SelectionTime | None:
    """Return the curve through a profile's selection times; None if it has none."""
    points = [
        (row.size, row.selection_s)
        for row in profile.variables
        if row.selection_s is not None and row.size
    ]
    return interpolated_time(points) if points else None
