"""Steps down at given epochs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tfcommx.recipes.reader import Part


class Step(Part):
    """The peak, multiplied by `times` at each of the epochs `at`.

    >>> Step(at=(30, 60, 80)).factor(350, 0, 900, 10)
    0.1

    **Source:** Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 5.1.
    """

    name: Literal["step"] = "step"
    # Counted over the whole run; the decay comes at the beginning of the epoch
    at: tuple[Annotated[float, Field(gt=0)], ...] = Field((30, 60, 80), min_length=1)
    times: float = Field(0.1, gt=0, lt=1)

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        """Return the learning rate over its peak."""
        passed = sum(step >= epoch * steps_per_epoch for epoch in self.at)
        return self.times**passed
