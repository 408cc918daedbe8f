"""Adam with decoupled weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.optimizers.sgd import NOT_DECAYED
from tfcommx.recipes.reader import Part

if TYPE_CHECKING:
    import keras


class AdamW(Part):
    """Adam with decoupled weight decay; without decay it is Adam."""

    name: Literal["adamw"] = "adamw"
    beta_1: float = Field(0.9, ge=0, lt=1)
    # 0.98 and epsilon 1e-9 are usual for Transformers
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-7, gt=0)
    # Part of a weight that is taken away in a step if the learning rate is 1; not from biases and
    # normalisation
    weight_decay: float = Field(0.004, ge=0)

    @property
    def momentum(self) -> float:
        """Momentum of the first moment."""
        return self.beta_1

    def build(self) -> keras.optimizers.Optimizer:
        """Build Keras's AdamW with learning rate 0: each step sets its own."""
        import keras

        optimizer = keras.optimizers.AdamW(
            0.0,
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
        )
        if self.weight_decay:
            optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
        return optimizer
