"""Make the rows of a comparison from trainings and step times; pure functions of numbers.

A row describes one method at one bandwidth; `--json` writes it, and tables show it. It has the
method's scores at equal steps, bytes and time, and whether it is in the Pareto set. A curve holds
a training's cumulative cost and its score at the end of each epoch:

    score |            .--o--o   b         b is better at equal steps, a at equal cost up to where
          |   o--o--o-'   a                they cross
          |  o   .-o
          | o  o'
          +--------------------- cost: bytes, or seconds
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# Ratio below which two costs count as equal, because predictions are not more exact than that
ALIKE = 1.02


class Curve(NamedTuple):
    """A training's cumulative costs and its scores, one of each for every epoch."""

    costs: Sequence[float]
    scores: Sequence[float]

    def score_within(self, budget: float) -> float | None:
        """Return the score of the last epoch that ended within a budget; None if none did.

        >>> Curve([1, 2, 3], [0.5, 0.8, 0.7]).score_within(2.5)
        0.8
        """
        ended = [score for cost, score in zip(*self, strict=True) if cost <= budget]
        return ended[-1] if ended else None

    def cost_to(self, target: float) -> float | None:
        """Return the cost at which a score was first reached; None if it was not.

        >>> Curve([1, 2, 3], [0.5, 0.8, 0.7]).cost_to(0.6)
        2
        """
        reached = (cost for cost, score in zip(*self, strict=True) if score >= target)
        return next(reached, None)


class Spread(NamedTuple):
    """A mean over seeds, with its standard deviation."""

    mean: float
    # 0 for one seed, NaN if a value is
    spread: float


def over_seeds(values: Sequence[float | None]) -> Spread | None:
    """Return mean and standard deviation over seeds; None without seeds, or if one has no value.

    >>> over_seeds([1.0, 3.0])
    Spread(mean=2.0, spread=1.4142135623730951)
    """
    present = [value for value in values if value is not None]
    # A mean over fewer seeds would favour a method that fails with the others
    if not present or len(present) < len(values):
        return None
    mean = statistics.fmean(present)
    # After a training that diverged; `stdev` would raise an AttributeError for its NaN
    if not math.isfinite(mean):
        return Spread(mean, math.nan)
    return Spread(mean, statistics.stdev(present) if len(present) > 1 else 0.0)


class Point(NamedTuple):
    """A method's total cost and final score: means over seeds."""

    cost: float
    # NaN after a training that diverged
    score: float

    @property
    def ordered_score(self) -> float:
        """The score, or minus infinity for NaN, which compares with nothing."""
        return -math.inf if math.isnan(self.score) else self.score


def pareto(points: Mapping[str, Point]) -> list[str]:
    """Return the methods that no other method beats, the cheapest first.

    A method beats another if it costs at most as much and scores at least as high, and the two are
    not equal.

    >>> pareto({"a": Point(1, 0.8), "b": Point(2, 0.9), "c": Point(3, 0.9), "d": Point(4, 0.95)})
    ['a', 'b', 'd']
    """
    # Because two points with NaN are never equal, and each would beat the other
    ordered = {name: Point(point.cost, point.ordered_score) for name, point in points.items()}

    def is_beaten(candidate: Point) -> bool:
        rivals = (rival for rival in ordered.values() if rival != candidate)
        return any(
            rival.cost <= candidate.cost and rival.score >= candidate.score for rival in rivals
        )

    unbeaten = [name for name, point in ordered.items() if not is_beaten(point)]
    return sorted(unbeaten, key=ordered.__getitem__)


def cheapest_within(points: Mapping[str, Point], reference: str, loss: float) -> str:
    """Return the cheapest method whose score is at most `loss` below the reference's.

    >>> cheapest_within({"a": Point(1, 0.8), "b": Point(2, 0.9), "c": Point(5, 1.0)}, "c", 0.1)
    'b'

    Returns:
        Its name: the reference's if no other method is cheaper. Among methods whose costs differ by
        less than the factor ALIKE, the one with the best score.
    """
    # Tolerance, because rounding may push a loss of exactly the allowed size above it
    least = points[reference].ordered_score - loss - 1e-9
    allowed = {name: point for name, point in points.items() if point.ordered_score >= least}
    most = ALIKE * min(point.cost for point in allowed.values())
    alike = {name: point for name, point in allowed.items() if point.cost <= most}
    return max(alike, key=lambda name: (alike[name].ordered_score, -alike[name].cost))


# Shares of the reference's bytes, and of its time, at which scores are compared
BYTES_SHARES = (0.01, 0.03, 0.1)
TIME_SHARES = (0.25, 0.5, 1.0)
# The method that others are compared with, if the comparison has it
REFERENCE = "dense"
Row = dict[str, Any]


class Score(NamedTuple):
    """A score of a task, as tables show it."""

    # Key in a training's rows
    key: str
    text: str
    # Shown value / value in rows
    factor: float
    # Allowed difference below the reference's score, in shown units: the default target
    loss: float


# Trainings are compared by the first of these that their task has
SCORES = (Score("test_bleu", "BLEU", 1.0, 0.5), Score("test_accuracy", "accuracy, %", 100.0, 0.2))


class Steps(NamedTuple):
    """Seconds of a step of each method at a bandwidth, epoch by epoch."""

    # Bit/s
    bandwidth: float
    # Method -> seconds of a step in each epoch
    seconds: Mapping[str, Sequence[float]]
    # Method -> predicted over measured time of all measured epochs; empty: nothing was measured
    ratios: Mapping[str, float] = {}


class Comparison(NamedTuple):
    """Trainings and step times of all methods."""

    # Method -> its trainings, one for each seed
    trainings: Mapping[str, Sequence[Row]]
    steps: Sequence[Steps]
    score: Score
    # In shown units; None: the reference's mean at the end, less the score's loss
    target: float | None = None

    @property
    def reference(self) -> str:
        return REFERENCE if REFERENCE in self.trainings else next(iter(self.trainings))

    def scores(self, training: Row) -> list[float]:
        """Return the score at the end of each epoch, as shown."""
        return [self.score.factor * epoch[self.score.key] for epoch in training["epochs"]]

    def by_bytes(self, training: Row) -> Curve:
        sent = [epoch["bytes_between_nodes"] for epoch in training["epochs"]]
        return Curve(sent, self.scores(training))

    def by_time(self, training: Row, seconds: Sequence[float]) -> Curve:
        """Return the scores over the time of steps, which take `seconds` in each epoch."""
        ends, elapsed = [], 0.0
        for epoch, step in zip(training["epochs"], seconds, strict=True):
            elapsed += epoch["steps"] * step
            ends.append(elapsed)
        return Curve(ends, self.scores(training))

    def final(self, method: str) -> Spread:
        spread = over_seeds([self.scores(training)[-1] for training in self.trainings[method]])
        assert spread is not None
        return spread

    def wanted(self) -> float:
        """Return the target, as shown."""
        if self.target is not None:
            return self.target
        return self.final(self.reference).mean - self.score.loss

    def points(self, seconds: Mapping[str, Sequence[float]] | None = None) -> dict[str, Point]:
        """Return the total cost, in bytes or in seconds of steps, and the score of each method."""
        points = {}
        for name, trainings in self.trainings.items():
            if seconds is None:
                curves = [self.by_bytes(training) for training in trainings]
            else:
                curves = [self.by_time(training, seconds[name]) for training in trainings]
            cost = over_seeds([curve.costs[-1] for curve in curves])
            assert cost is not None
            points[name] = Point(cost.mean, self.final(name).mean)
        return points


def score_of(training: Row) -> Score:
    return next(score for score in SCORES if score.key in training["epochs"][-1])


def rows_of(comparison: Comparison) -> list[Row]:
    """Return a row for each method at each bandwidth; without bandwidths one for each method."""
    common = method_rows(comparison)
    return [
        {**common[row["name"]], **row}
        for steps in comparison.steps
        for row in time_rows(comparison, steps).values()
    ] or list(common.values())


def method_rows(comparison: Comparison) -> dict[str, Row]:
    """Return the columns that do not depend on the network, by method: scores, and bytes."""
    points, dense = comparison.points(), comparison.reference
    best, rows = pareto(points), {}
    for name, trainings in comparison.trainings.items():
        end = comparison.final(name)
        curves = [comparison.by_bytes(training) for training in trainings]
        rows[name] = {
            "name": name,
            "score": comparison.score.text,
            "mean": end.mean,
            "spread": end.spread,
            "loss": comparison.final(dense).mean - end.mean,
            "bytes_between": points[name].cost,
            # On a single node no method sends anything, so all are alike
            "bytes_share": points[name].cost / points[dense].cost if points[dense].cost else 1.0,
            **_at_shares("bytes", BYTES_SHARES, curves, points[dense].cost),
            "target": comparison.wanted(),
            **_to_target("bytes", comparison, curves),
            "best_in_bytes": name in best,
        }
    return rows


def time_rows(comparison: Comparison, steps: Steps) -> dict[str, Row]:
    """Return the columns that depend on the bandwidth, by method: time, scores at equal time."""
    points, dense = comparison.points(steps.seconds), comparison.reference
    best, rows = pareto(points), {}
    for name, trainings in comparison.trainings.items():
        curves = [comparison.by_time(training, steps.seconds[name]) for training in trainings]
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
            **_to_target("seconds", comparison, curves),
            "best_in_time": name in best,
        }
    return rows


def _at_shares(
    unit: str, shares: Sequence[float], curves: Sequence[Curve], reference_cost: float
) -> Row:
    row = {}
    for share in shares:
        # Tolerance, because costs are sums of floats, or counts with some bytes of bookkeeping
        reached = over_seeds(
            [curve.score_within(share * reference_cost * (1 + 1e-3)) for curve in curves]
        )
        row[f"within_{100 * share:g}_percent_of_{unit}"] = reached and reached.mean
    return row


def _to_target(unit: str, comparison: Comparison, curves: Sequence[Curve]) -> Row:
    costs = [curve.cost_to(comparison.wanted()) for curve in curves]
    mean = over_seeds(costs)
    reached = sum(cost is not None for cost in costs)
    return {
        f"{unit}_to_target": mean and mean.mean,
        "seeds": len(curves),
        "seeds_at_target": reached,
    }


# --- In words ---------------------------------------------------------------------------------


def pareto_words(points: Mapping[str, Point], text: Callable[[float], str], unit: str) -> str:
    """Return a sentence on which methods no other method beats.

    >>> points = {"a": Point(1, 80.0), "b": Point(2, 70.0), "c": Point(3, 90.0)}
    >>> pareto_words(points, lambda cost: f"{cost:g} s", "time")
    'In time nothing beats a (80.00 after 1 s), then c (90.00 after 3 s). Beaten: b, by a.'
    """
    best = pareto(points)
    parts = [f"{name} ({points[name].score:.2f} after {text(points[name].cost)})" for name in best]
    beaten = []
    for name, point in points.items():
        if name not in best:
            # The dearest that costs no more scores highest, because both rise within the Pareto set
            by = next(rival for rival in reversed(best) if points[rival].cost <= point.cost)
            beaten.append(f"{name}, by {by}")
    tail = f" Beaten: {'; '.join(beaten)}." if beaten else ""
    return f"In {unit} nothing beats {', then '.join(parts)}.{tail}"


def choices(
    comparison: Comparison, losses: Sequence[float]
) -> list[tuple[float, list[tuple[str, float]]]]:
    """Return, for each bandwidth, the fastest method for each loss, and its speed-up."""
    rows = []
    for steps in comparison.steps:
        points = comparison.points(steps.seconds)
        dense, chosen = points[comparison.reference].cost, []
        for loss in losses:
            name = cheapest_within(points, comparison.reference, loss)
            chosen.append((name, dense / points[name].cost))
        rows.append((steps.bandwidth, chosen))
    return rows
