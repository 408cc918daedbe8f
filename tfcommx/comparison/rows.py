"""Make the rows of a comparison from trainings and step times; pure functions of numbers.

A row is one method at one bandwidth: what `--json` writes, and tables show. It has the method's
scores at equal steps, bytes and time, and whether it is in the Pareto set. A curve is what a
training had spent at the end of each of its epochs, and its score there:

    score |            .--o--o   b         b is better at equal steps, a at equal cost up to where
          |   o--o--o-'   a                they cross
          |  o   .-o
          | o  o'
          +--------------------- cost: bytes, or seconds
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


# Shares of the reference's bytes, and of its time, at which methods are compared
BYTES_SHARES = (0.01, 0.03, 0.1)
TIME_SHARES = (0.25, 0.5, 1.0)
# The method that others are compared with, if it is there
REFERENCE = "dense"
Row = dict[str, Any]


class Score(NamedTuple):
    """A score of a task, as tables show it."""

    # In a training's rows
    key: str
    text: str
    # Shown / in rows
    factor: float
    # How much less than the reference's counts as reached, as shown
    loss: float


# The first one that a task has counts
SCORES = (Score("test_bleu", "BLEU", 1.0, 0.5), Score("test_accuracy", "accuracy, %", 100.0, 0.2))


class Steps(NamedTuple):
    """What a step of each method takes at a bandwidth, in seconds, epoch by epoch."""

    # Bit/s
    bandwidth: float
    # Method -> epochs
    seconds: Mapping[str, Sequence[float]]
    # Method -> predicted over measured time of the whole training; empty: nothing was measured
    ratios: Mapping[str, float] = {}


class Comparison(NamedTuple):
    """All that was found."""

    # Method -> one training a seed
    trainings: Mapping[str, Sequence[Row]]
    steps: Sequence[Steps]
    score: Score
    # As shown; None: the reference's mean at the end, less the score's loss
    target: float | None = None

    @property
    def reference(self) -> str:
        """The method that others are compared with."""
        return REFERENCE if REFERENCE in self.trainings else next(iter(self.trainings))

    def scores(self, training: Row) -> list[float]:
        """Return the score at the end of each epoch, as shown."""
        return [self.score.factor * epoch[self.score.key] for epoch in training["epochs"]]

    def by_bytes(self, training: Row) -> Curve:
        """Return the scores over the bytes that a rank has sent to other nodes."""
        sent = [epoch["bytes_between_nodes"] for epoch in training["epochs"]]
        return Curve(sent, self.scores(training))

    def by_time(self, training: Row, seconds: Sequence[float]) -> Curve:
        """Return the scores over the time of steps, which take `seconds` in each epoch."""
        ends, now = [], 0.0
        for epoch, step in zip(training["epochs"], seconds, strict=True):
            now += epoch["steps"] * step
            ends.append(now)
        return Curve(ends, self.scores(training))

    def final(self, method: str) -> Spread:
        """Return the score at the end."""
        found = over_seeds([self.scores(one)[-1] for one in self.trainings[method]])
        assert found is not None
        return found

    def wanted(self) -> float:
        """Return the target, as shown."""
        if self.target is not None:
            return self.target
        return self.final(self.reference).mean - self.score.loss

    def points(self, seconds: Mapping[str, Sequence[float]] | None = None) -> dict[str, Point]:
        """Return what each method costs in all, and its score: bytes, or seconds of its steps."""
        found = {}
        for name, trainings in self.trainings.items():
            curves = [
                self.by_bytes(one) if seconds is None else self.by_time(one, seconds[name])
                for one in trainings
            ]
            cost = over_seeds([curve.costs[-1] for curve in curves])
            assert cost is not None
            found[name] = Point(cost.mean, self.final(name).mean)
        return found


def score_of(training: Row) -> Score:
    """Return the score by which trainings are compared."""
    return next(score for score in SCORES if score.key in training["epochs"][-1])


def rows_of(found: Comparison) -> list[Row]:
    """Return a row for each method at each bandwidth; without bandwidths one for each method."""
    common = method_rows(found)
    return [
        {**common[row["name"]], **row}
        for steps in found.steps
        for row in time_rows(found, steps).values()
    ] or list(common.values())


def method_rows(found: Comparison) -> dict[str, Row]:
    """Return what does not depend on the network, by method: scores at equal steps and bytes."""
    points, dense = found.points(), found.reference
    best, rows = pareto(points), {}
    for name, trainings in found.trainings.items():
        end, curves = found.final(name), [found.by_bytes(one) for one in trainings]
        rows[name] = {
            "name": name,
            "score": found.score.text,
            "mean": end.mean,
            "spread": end.spread,
            "loss": found.final(dense).mean - end.mean,
            "bytes_between": points[name].cost,
            "bytes_share": points[name].cost / points[dense].cost if points[dense].cost else 1.0,
            **_at_shares("bytes", BYTES_SHARES, curves, points[dense].cost),
            "target": found.wanted(),
            **_to_target("bytes", found, curves),
            "best_in_bytes": name in best,
        }
    return rows


def time_rows(found: Comparison, steps: Steps) -> dict[str, Row]:
    """Return what depends on the bandwidth, by method: time, and scores at equal time."""
    points, dense = found.points(steps.seconds), found.reference
    best, rows = pareto(points), {}
    for name, trainings in found.trainings.items():
        curves = [found.by_time(one, steps.seconds[name]) for one in trainings]
        count = sum(epoch["steps"] for epoch in trainings[0]["epochs"])
        rows[name] = {
            "name": name,
            "bandwidth_mbit": steps.bandwidth / 1e6,
            "measured": name in steps.ratios,
            "predicted_over_measured": steps.ratios.get(name),
            "step_seconds": points[name].cost / count,
            "seconds": points[name].cost,
            "times_faster": points[dense].cost / points[name].cost,
            **_at_shares("time", TIME_SHARES, curves, points[dense].cost),
            **_to_target("seconds", found, curves),
            "best_in_time": name in best,
        }
    return rows


def _at_shares(what: str, shares: Sequence[float], curves: Sequence[Curve], whole: float) -> Row:
    """Return the mean scores where shares of what the reference costs in all are spent."""
    found = {}
    for share in shares:
        # Costs are sums of floats, or counts that differ by some bytes of bookkeeping
        reached = over_seeds([curve.score_within(share * whole * (1 + 1e-3)) for curve in curves])
        found[f"within_{100 * share:g}_percent_of_{what}"] = reached and reached.mean
    return found


def _to_target(what: str, found: Comparison, curves: Sequence[Curve]) -> Row:
    costs = [curve.cost_to(found.wanted()) for curve in curves]
    mean = over_seeds(costs)
    reached = sum(cost is not None for cost in costs)
    return {
        f"{what}_to_target": mean and mean.mean,
        "seeds": len(curves),
        "seeds_at_target": reached,
    }


# --- In words ---------------------------------------------------------------------------------


def pareto_words(points: Mapping[str, Point], text: Callable[[float], str], what: str) -> str:
    """Say which methods no other one beats.

    >>> points = {"a": Point(1, 80.0), "b": Point(2, 70.0), "c": Point(3, 90.0)}
    >>> pareto_words(points, lambda cost: f"{cost:g} s", "time")
    'In time nothing beats a (80.00 after 1 s), then c (90.00 after 3 s). Beaten: b, by a.'
    """
    best = pareto(points)
    said = [f"{name} ({points[name].score:.2f} after {text(points[name].cost)})" for name in best]
    beaten = []
    for name, point in points.items():
        if name not in best:
            by = next(one for one in reversed(best) if points[one].cost <= point.cost)
            beaten.append(f"{name}, by {by}")
    tail = f" Beaten: {'; '.join(beaten)}." if beaten else ""
    return f"In {what} nothing beats {', then '.join(said)}.{tail}"


def choices(
    found: Comparison, losses: Sequence[float]
) -> list[tuple[float, list[tuple[str, float]]]]:
    """Return, for each bandwidth, the fastest method for each loss, and how much faster it is."""
    rows = []
    for steps in found.steps:
        points = found.points(steps.seconds)
        dense, chosen = points[found.reference].cost, []
        for loss in losses:
            name = cheapest_within(points, found.reference, loss)
            chosen.append((name, dense / points[name].cost))
        rows.append((steps.bandwidth, chosen))
    return rows
