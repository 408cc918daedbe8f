"""Layer-wise adaptive moments, for large batches of Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.reader import Part

if TYPE_CHECKING:
    import keras


class Lamb(Part):
    """LAMB; biases and normalisation are excluded."""

    name: Literal["lamb"] = "lamb"
    beta_1: float = Field(0.9, ge=0, lt=1)
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)

    @property
    def momentum(self) -> float:
        """Momentum of the first moment."""
        return self.beta_1

    def build(self) -> keras.optimizers.Optimizer:
        """Build LAMB with learning rate 0: each step sets its own."""
        from tfcommx.optim.lamb import LAMB

        return LAMB(
            0.0,
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay or None,
        )
