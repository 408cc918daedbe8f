"""The score that a run is to reach, as benchmarks of time to accuracy ask for."""

from __future__ import annotations

from pydantic import Field

from tfcommx.recipes.reader import Part


class Target(Part):
    """A score of the evaluation, and the least that it must be; the run goes on when it is there.

    **Source:** DAWNBench's instructions for ImageNet (github.com/stanford-futuredata/
    dawn-bench-entries, README): the first epoch with a top-5 accuracy of at least 93 %.
    """

    # As the task calls it, without `test_`: accuracy, top5, bleu
    score: str = Field("accuracy", min_length=1)
    at_least: float = Field(allow_inf_nan=False)
