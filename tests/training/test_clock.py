"""The clock of a run leaves evaluation and saving out; a target is a score of the task."""

from types import SimpleNamespace

import pytest

from tfcommx.core import ConfigurationError
from tfcommx.recipes.recipe import Target
from tfcommx.recipes.tasks.classify import Classification
from tfcommx.training.context import RunContext
from tfcommx.training.run import check_target


def test_evaluation_and_saving_are_left_out():
    """Those of the epochs that have ended, and of the one that ends."""
    timing = SimpleNamespace(seconds={"evaluation": 3.0, "saving": 2.0, "compute": 50.0})
    rows = [{"seconds": {"evaluation": 5.0, "saving": 1.0, "compute": 20.0}}]
    totals = SimpleNamespace(seconds=lambda: 100.0)
    context = RunContext(None, None, None, totals, None, None, rows=rows, timing=timing)
    assert context.clock() == 89.0


def test_a_target_needs_a_score_that_is_found():
    check_target(Target(score="top5", at_least=0.9), Classification(1, 6))
    with pytest.raises(ConfigurationError, match=r"\baccuracy\b.*'top5'"):
        check_target(Target(score="top5", at_least=0.9), Classification(1, 5))
