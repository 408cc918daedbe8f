"""Layer-wise adaptive rate scaling, for large batches of convolutional networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.reader import Part

if TYPE_CHECKING:
    import keras


class Lars(Part):
    """LARS; biases and normalisation are excluded."""

    name: Literal["lars"] = "lars"
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    # Part of the gradient, and of the ratio
    weight_decay: float = Field(5e-4, ge=0)
    trust_coefficient: float = Field(0.001, gt=0)

    def build(self) -> keras.optimizers.Optimizer:
        """Build LARS with learning rate 0: each step sets its own."""
        from tfcommx.optim.lars import LARS

        return LARS(
            0.0,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay or None,
            trust_coefficient=self.trust_coefficient,
        )
