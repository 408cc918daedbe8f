"""Strategies of the recipes: who updates the weights, and how often ranks meet.

To add one: write a frozen `Part` with a `name`, the strategy's options, and `build`; add a row to
`STRATEGIES`. tfcommx's strategies load TensorFlow, so they are imported inside functions only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import Field

from tfcommx.recipes.reader import Part

if TYPE_CHECKING:
    from tfcommx.strategies import Strategy


class StrategyRecipe(Protocol):
    """A strategy and its options."""

    @property
    def every(self) -> int:
        """Steps from one exchange to the next, >= 1."""

    def build(self) -> Strategy:
        """Build what `cx.DistributedOptimizer(strategy=)` takes."""


class Synchronous(Part):
    """Gradients are exchanged in every step, and every rank applies them, as with Horovod."""

    name: Literal["synchronous"] = "synchronous"

    @property
    def every(self) -> int:
        """Ranks meet in every step."""
        return 1

    def build(self) -> Strategy:
        """Build the default strategy."""
        from tfcommx.strategies import Synchronous as Built

        return Built()


class WeightAveraging(Part):
    """Each rank applies its own gradients; every few steps the weights are averaged (local SGD)."""

    name: Literal["weight_averaging"] = "weight_averaging"
    # Steps after which weights are averaged
    every: int = Field(8, ge=1)
    # The weights, by dense schemes; or the updates since the last average, by any scheme
    sends: Literal["weights", "updates"] = "weights"
    # Of the optimizer's state at an average: each rank keeps its own, all average, or all reset it
    momentum: Literal["keep", "average", "reset"] = "keep"

    def build(self) -> Strategy:
        """Build tfcommx's WeightAveraging."""
        from tfcommx.strategies import WeightAveraging as Built

        return Built(self.every, self.sends, self.momentum)


STRATEGIES: dict[str, type[StrategyRecipe]] = {
    "synchronous": Synchronous,
    "weight_averaging": WeightAveraging,
}
