"""Decay of the learning rate after the warm-up.

To add a schedule: write a frozen `RecipePart` that satisfies `Schedule` (its settings, a `name` and
`factor`, a pure function), and add a row to `SCHEDULES`.
"""

import math
from typing import Annotated, Literal, Protocol

from pydantic import Field

from tfcommx.recipes.reader import RecipePart


class Schedule(Protocol):
    """The decay of the learning rate after the warm-up."""

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        """Return the learning rate divided by its peak, in [0, 1].

        Args:
            step: step of the whole run, in [warm_up, steps).
            warm_up: number of steps of the warm-up, >= 0.
            steps: number of steps of the whole run.
            steps_per_epoch: number of steps of an epoch, >= 1.
        """


class Cosine(RecipePart):
    """Half a cosine wave, from the peak to zero at the end of the run.

    >>> Cosine().factor(50, 0, 100, 10)
    0.5

    **Source:** Loshchilov, Hutter, "SGDR" (2017), equation 5, without restarts.
    """

    name: Literal["cosine"] = "cosine"

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        return (1 + math.cos(math.pi * _progress(step, warm_up, steps))) / 2


class Polynomial(RecipePart):
    """The polynomial (1 - end) (1 - progress) ** power + end; power 2 is usual with LARS.

    >>> Polynomial(power=2).factor(50, 0, 100, 10)
    0.25

    **Source:** You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
    section 5.
    """

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(2.0, gt=0)
    # Learning rate at the end of the run over the peak
    end: float = Field(0.0, ge=0, le=1)

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        remaining = 1 - _progress(step, warm_up, steps)
        return float((1 - self.end) * remaining**self.power + self.end)


class Linear(Polynomial):
    """A straight line: the polynomial of power 1."""

    name: Literal["linear"] = "linear"  # type: ignore[assignment]
    power: float = Field(1.0, ge=1, le=1)


class StepDecay(RecipePart):
    """The peak, multiplied by `times` at each of the epochs `at`.

    >>> StepDecay(at=(30, 60, 80)).factor(350, 0, 900, 10)
    0.1

    **Source:** Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 5.1.
    """

    name: Literal["step"] = "step"
    # Epochs of the whole run at whose beginning the rate decays
    at: tuple[Annotated[float, Field(gt=0)], ...] = Field((30, 60, 80), min_length=1)
    times: float = Field(0.1, gt=0, lt=1)

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        return self.times ** sum(step >= epoch * steps_per_epoch for epoch in self.at)


class InverseSqrt(RecipePart):
    """The factor sqrt(warm_up / step): 1 at the end of the warm-up, 1/2 at four times that step.

    >>> InverseSqrt().factor(16000, 4000, 100000, 1000)
    0.5

    **Source:** Vaswani et al., "Attention Is All You Need" (2017), equation 3; there the peak is
    (width * warm_up) ** -0.5.
    """

    name: Literal["inverse_sqrt"] = "inverse_sqrt"

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        # At least 1, because a run without a warm-up begins at step 0
        return math.sqrt(max(1.0, warm_up) / max(1.0, warm_up, step))


SCHEDULES: dict[str, type[Schedule]] = {
    "cosine": Cosine,
    "linear": Linear,
    "polynomial": Polynomial,
    "step": StepDecay,
    "inverse_sqrt": InverseSqrt,
}


def _progress(step: float, warm_up: float, steps: float) -> float:
    """Return the completed share of the decay, in [0, 1)."""
    # At least 1, because a run may end with its warm-up
    return (step - warm_up) / max(1.0, steps - warm_up)
