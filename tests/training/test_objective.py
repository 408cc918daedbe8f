"""Requirements on a task, checked before a run's first step."""

from __future__ import annotations

import pytest

from tfcommx.core import ConfigurationError
from tfcommx.recipes.tasks.classify import Classification
from tfcommx.training.run import check_counted


def test_a_task_says_what_a_batch_counts() -> None:
    class Silent:
        """A user's task that does not."""

    check_counted(Classification(1, 5))
    with pytest.raises(ConfigurationError, match=r"`counted`.*\bSilent\b"):
        check_counted(Silent())
