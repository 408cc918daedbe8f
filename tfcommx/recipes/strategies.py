"""Strategies of the recipes: how weights are updated, and how often ranks exchange.

To add one: write a frozen `RecipePart` with a `name`, the strategy's options, and `build`; add a
row to `STRATEGIES`. tfcommx's strategies are imported inside functions only, because they load
TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    import keras

    from tfcommx.strategies.strategy import Strategy


class StrategyRecipe(Protocol):
    """A strategy and its options."""

    @property
    def every(self) -> int:
        """Steps from one exchange to the next, >= 1."""

    @property
    def overlapped_steps(self) -> int:
        """Number of steps during which the data of an exchange is in transit, >= 0."""

    @property
    def gathers_in_node(self) -> int:
        """All-gathers of whole vectors in a node beside a route by node, >= 0; a sum is two."""

    def build(self) -> Strategy:
        """Build the strategy for `cx.DistributedOptimizer(strategy=)`."""


class InEachStep(RecipePart):
    """A strategy that exchanges in every step, in which the results arrive."""

    every: ClassVar[int] = 1
    overlapped_steps: ClassVar[int] = 0
    gathers_in_node: ClassVar[int] = 0


class SynchronousRecipe(InEachStep):
    """Gradients are exchanged in every step, and every rank applies them, as with Horovod."""

    name: Literal["synchronous"] = "synchronous"

    def build(self) -> Strategy:
        from tfcommx.strategies.synchronous import Synchronous as Built

        return Built()


class OuterSgd(RecipePart):
    """The outer optimizer of weight averaging: SGD with momentum, by default DiLoCo's."""

    # Learning rate for the averaged updates; 1 without momentum is plain averaging
    learning_rate: float = Field(0.7, gt=0, allow_inf_nan=False)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True

    def build(self) -> keras.optimizers.Optimizer:
        import keras

        options = {"momentum": self.momentum, "nesterov": self.nesterov and self.momentum > 0}
        return keras.optimizers.SGD(self.learning_rate, **options)


class WeightAveragingRecipe(RecipePart):
    """Each rank applies its own gradients; every few steps the weights are averaged (local SGD)."""

    name: Literal["weight_averaging"] = "weight_averaging"
    # Number of steps from one average to the next
    every: int = Field(8, ge=1)
    # Values to send: the weights, by dense schemes, or the updates since the last average, by any
    # scheme. With `outer`, updates are required
    sends: Literal["weights", "updates"] = "weights"
    # Optimizer state at an average: each rank keeps its own, all ranks average it, or all reset it
    momentum: Literal["keep", "average", "reset"] = "keep"
    # Optimizer that applies the averaged updates to the weights of the last average; None: weights
    # become the average
    outer: OuterSgd | None = None
    # Number of groups of variables, whose averages are spread over the steps
    fragments: int = Field(1, ge=1)
    # Steps of training while an average is in transit, at most every // fragments
    overlap: int = Field(0, ge=0)

    gathers_in_node: ClassVar[int] = 0

    @model_validator(mode="after")
    def _rounds_fit(self) -> WeightAveragingRecipe:
        if self.fragments > self.every:
            raise ValueError(
                f"fragments must be at most every={self.every}. Received {self.fragments}."
            )
        if self.overlap > (most := self.every // self.fragments):
            raise ValueError(
                f"overlap must be at most every // fragments = {most}. Received {self.overlap}."
            )
        return self

    @property
    def overlapped_steps(self) -> int:
        """Sum of `overlap` over the fragments, because these are sent one after another."""
        return self.fragments * self.overlap

    def build(self) -> Strategy:
        """Build WeightAveraging. **Raises:** ConfigurationError for conflicting options."""
        from tfcommx.strategies.averaging.strategy import WeightAveraging as Built

        outer = None if self.outer is None else self.outer.build()
        return Built(self.every, self.sends, self.momentum, outer, self.fragments, self.overlap)


class StepAheadRecipe(InEachStep):
    """Each node's gradients are computed at weights that contain its own unsent updates."""

    name: Literal["step_ahead"] = "step_ahead"
    # Share of a node's unsent updates that its weights contain
    coefficient: float = Field(1.0, gt=0, le=1)

    # The node's gradients are summed, and its residuals gathered
    gathers_in_node = 3

    def build(self) -> Strategy:
        from tfcommx.strategies.step_ahead import StepAhead as Built

        return Built(self.coefficient)


STRATEGIES: dict[str, type[StrategyRecipe]] = {
    "synchronous": SynchronousRecipe,
    "weight_averaging": WeightAveragingRecipe,
    "step_ahead": StepAheadRecipe,
}
