"""What trainings show of a method: scores at equal steps, bytes and time; the Pareto set.

Pure functions of numbers. A curve is what a training had spent at the end of each of its epochs,
and its score there:

    score |            .--o--o   b         b is better at equal steps, a at equal cost up to where
          |   o--o--o-'   a                they cross
          |  o   .-o
          | o  o'
          +--------------------- cost: bytes, or seconds
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Costs that differ by less are as good as equal: predictions are not that exact
ALIKE = 1.02


class Curve(NamedTuple):
    """A training's costs so far and scores, one of each for every epoch."""

    costs: Sequence[float]
    scores: Sequence[float]

    def score_within(self, budget: float) -> float | None:
        """Return the score of the last epoch that ended within a budget; None: none did.

        >>> Curve([1, 2, 3], [0.5, 0.8, 0.7]).score_within(2.5)
        0.8
        """
        ended = [score for cost, score in zip(*self, strict=True) if cost <= budget]
        return ended[-1] if ended else None

    def cost_to(self, target: float) -> float | None:
        """Return what was spent when a score was first reached; None: it was not.

        >>> Curve([1, 2, 3], [0.5, 0.8, 0.7]).cost_to(0.6)
        2
        """
        reached = (cost for cost, score in zip(*self, strict=True) if score >= target)
        return next(reached, None)


class Spread(NamedTuple):
    """A mean over seeds, with its standard deviation."""

    mean: float
    # 0 for one seed
    spread: float
    # How many
    seeds: int


def over_seeds(values: Sequence[float | None]) -> Spread | None:
    """Return mean and standard deviation over seeds; None if a seed has no value, or none is there.

    >>> over_seeds([1.0, 3.0])
    Spread(mean=2.0, spread=1.4142135623730951, seeds=2)
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return Spread(statistics.fmean(known), spread, len(known))


class Point(NamedTuple):
    """What a method costs in all, and what it reaches: means over seeds."""

    cost: float
    score: float


def pareto(points: Mapping[str, Point]) -> list[str]:
    """Return the methods that no other one beats, the cheapest first.

    One that costs at most as much, and scores at least as high, beats another, unless both are
    equal.

    >>> pareto({"a": Point(1, 0.8), "b": Point(2, 0.9), "c": Point(3, 0.9), "d": Point(4, 0.95)})
    ['a', 'b', 'd']
    """

    def is_beaten(one: Point) -> bool:
        others = (other for other in points.values() if other != one)
        return any(other.cost <= one.cost and other.score >= one.score for other in others)

    kept = [name for name, point in points.items() if not is_beaten(point)]
    return sorted(kept, key=lambda name: points[name])


def cheapest_within(points: Mapping[str, Point], reference: str, loss: float) -> str:
    """Return the cheapest method that loses at most so much against the reference.

    >>> cheapest_within({"a": Point(1, 0.8), "b": Point(2, 0.9), "c": Point(5, 1.0)}, "c", 0.1)
    'b'

    Returns:
        Its name: the reference's if there is no cheaper one. Costs that differ by less than ALIKE
        count as one: of these it is the method with the best score.
    """
    # A loss of exactly as much as is allowed may be a bit more in floating point
    least = points[reference].score - loss - 1e-9
    allowed = {name: point for name, point in points.items() if point.score >= least}
    most = ALIKE * min(point.cost for point in allowed.values())
    alike = {name: point for name, point in allowed.items() if point.cost <= most}
    return max(alike, key=lambda name: (alike[name].score, -alike[name].cost))
