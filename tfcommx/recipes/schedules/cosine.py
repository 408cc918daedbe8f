"""Half a cosine wave, from the peak to zero at the end of the run."""

from __future__ import annotations

import math
from typing import Literal

from tfcommx.recipes.reader import Part
from tfcommx.recipes.schedules.base import done


class Cosine(Part):
    """(1 + cos(pi done)) / 2.

    >>> Cosine().factor(50, 0, 100, 10)
    0.5

    **Source:** Loshchilov, Hutter, "SGDR" (2017), equation 5, without restarts.
    """

    name: Literal["cosine"] = "cosine"

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        """Return the learning rate over its peak."""
        return (1 + math.cos(math.pi * done(step, warm_up, steps))) / 2
