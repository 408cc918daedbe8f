"""A power of what remains: from the peak to an end value."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfcommx.recipes.reader import Part
from tfcommx.recipes.schedules.base import done


class Polynomial(Part):
    """(1 - end) (1 - done) ** power + end; power 2 is usual with LARS.

    >>> Polynomial(power=2).factor(50, 0, 100, 10)
    0.25

    **Source:** You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
    section 5.
    """

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(2.0, gt=0)
    # Learning rate at the end over the peak
    end: float = Field(0.0, ge=0, le=1)

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        """Return the learning rate over its peak."""
        remaining = 1 - done(step, warm_up, steps)
        return float((1 - self.end) * remaining**self.power + self.end)


class Linear(Polynomial):
    """A straight line: the polynomial of power 1."""

    name: Literal["linear"] = "linear"
    power: float = Field(1.0, ge=1, le=1)
