"""Scores at equal cost, means over seeds, and the Pareto set, worked out by hand."""

from __future__ import annotations

import math

import pytest

from tfcommx.comparison.rows import Curve, Point, cheapest_within, over_seeds, pareto

CURVE = Curve([10, 20, 30], [50.0, 90.0, 80.0])


@pytest.mark.parametrize(
    ("budget", "score"), [(9, None), (10, 50.0), (19.9, 50.0), (20, 90.0), (1000, 80.0)]
)
def test_the_last_epoch_within_a_budget_counts(budget: float, score: float | None) -> None:
    """Not the best one so far, because a user who stops then cannot choose an earlier epoch."""
    assert CURVE.score_within(budget) == score


@pytest.mark.parametrize(("target", "cost"), [(50, 10), (50.1, 20), (90, 20), (90.1, None)])
def test_the_first_epoch_that_reaches_a_target_counts(target: float, cost: float | None) -> None:
    assert CURVE.cost_to(target) == cost


def test_a_mean_needs_a_value_of_every_seed() -> None:
    """Else it would be that of the lucky ones."""
    assert over_seeds([]) is None and over_seeds([1.0, None]) is None
    assert over_seeds([2.0]) == (2.0, 0.0)
    assert over_seeds([1.0, 2.0, 3.0]) == (2.0, 1.0)
    # A training that diverged ended the comparison in an AttributeError
    assert all(map(math.isnan, over_seeds([1.0, math.nan])))


def test_pareto() -> None:
    points = {
        "dear": Point(9, 80.0),  # Beaten: costs as much as the best, and is worse
        "best": Point(9, 91.0),
        "cheap": Point(1, 70.0),
        "same": Point(1, 70.0),  # Equal to another: both stay
        "worse": Point(2, 70.0),  # Beaten: as good as a cheaper one
        "middle": Point(3, 85.0),
    }
    assert pareto(points) == ["cheap", "same", "middle", "best"]
    assert pareto({}) == []
    # Each beat the other, so that a sentence on them found no best one
    assert pareto({name: Point(1, float("nan")) for name in "ab"}) == ["a", "b"]
    # A training that diverged
    assert pareto({**points, "nan": Point(1, math.nan)}) == ["cheap", "same", "middle", "best"]


def test_the_cheapest_within_a_loss() -> None:
    points = {"dense": Point(9, 91.2), "short": Point(2, 91.0), "tiny": Point(1, 90.0)}
    # 91.2 - 91.0 is more than 0.2 in floating point
    assert cheapest_within(points, "dense", 0.2) == "short"
    assert cheapest_within(points, "dense", 0.1) == "dense"
    assert cheapest_within(points, "dense", 1.3) == "tiny"
    # Of two that cost as much, or nearly so, the better one
    nearly = {**points, "better": Point(1.019, 90.5)}
    assert cheapest_within(nearly, "dense", 1.3) == "better"
    assert cheapest_within({**points, "tiny2": Point(1, 90.5)}, "dense", 1.3) == "tiny2"
    assert cheapest_within({**points, "nan": Point(1, math.nan)}, "dense", 1.3) == "tiny"
    assert cheapest_within({**points, "dense": Point(9, math.nan)}, "dense", 0.2) == "tiny"
