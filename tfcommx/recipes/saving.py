"""When a run saves checkpoints, and how many are kept."""

from __future__ import annotations

from pydantic import Field

from tfcommx.recipes.reader import Part


class Saving(Part):
    """Checkpoints besides those at each epoch's end, at the run's end, and when it is stopped."""

    # Steps of the whole run between two checkpoints; None: not by steps
    every_steps: int | None = Field(None, ge=1)
    # Minutes between two checkpoints, by rank 0's clock; None: not by time
    every_minutes: float | None = Field(None, gt=0)
    # Checkpoints that are kept
    keep: int = Field(3, ge=1)
