"""The inverse square root of the steps, as Transformers are trained."""

from __future__ import annotations

import math
from typing import Literal

from tfcommx.recipes.reader import Part


class InverseSqrt(Part):
    """sqrt(warm_up / step): the peak at the end of the warm-up, half of it at four times that.

    >>> InverseSqrt().factor(16000, 4000, 100000, 1000)
    0.5

    **Source:** Vaswani et al., "Attention Is All You Need" (2017), equation 3; there the peak is
    (width * warm_up) ** -0.5.
    """

    name: Literal["inverse_sqrt"] = "inverse_sqrt"

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        """Return the learning rate over its peak."""
        return math.sqrt(max(1.0, warm_up) / max(1.0, warm_up, step))
