"""Requirements on a task, checked before a run's first step."""

from __future__ import annotations

import pytest

from tfcommx.core import ConfigurationError
from tfcommx.recipes.tasks.classify import Classification
from tfcommx.training.run import check_counted, check_scores


def test_a_task_says_what_a_batch_counts() -> None:
    class Silent:
        """A user's task that does not."""

    check_counted(Classification(1, 5))
    with pytest.raises(ConfigurationError, match=r"`counted`.*\bSilent\b"):
        check_counted(Silent())


@pytest.mark.parametrize(("metric", "score"), [("acc", "test_accuracy"), ("accuracy", "test_f1")])
def test_a_task_without_an_accuracy_is_refused_before_the_first_epoch(
    metric: str, score: str
) -> None:
    """The first epoch ended with KeyError: 'accuracy', on every rank."""

    class Other(Classification):
        scores = (score,)

        def metrics(self) -> list[str]:
            return [metric]

    check_scores(Classification(1, 5))
    with pytest.raises(ConfigurationError, match=r"Other.*\b(acc|test_f1)\b"):
        check_scores(Other(1, 5))
