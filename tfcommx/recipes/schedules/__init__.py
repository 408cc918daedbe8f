"""How the learning rate decays after the warm-up: one schedule a file.

To add one: write a file with a frozen `Part` that satisfies `Schedule` (its settings, a `name` and
`factor`, a pure function), and add a row here.
"""

from __future__ import annotations

from tfcommx.recipes.schedules.base import Schedule
from tfcommx.recipes.schedules.cosine import Cosine
from tfcommx.recipes.schedules.inverse_sqrt import InverseSqrt
from tfcommx.recipes.schedules.polynomial import Linear, Polynomial
from tfcommx.recipes.schedules.step import Step

SCHEDULES: dict[str, type[Schedule]] = {
    "cosine": Cosine,
    "linear": Linear,
    "polynomial": Polynomial,
    "step": Step,
    "inverse_sqrt": InverseSqrt,
}

__all__ = ["SCHEDULES", "Schedule"]
