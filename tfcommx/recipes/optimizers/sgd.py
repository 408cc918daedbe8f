"""Stochastic gradient descent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.reader import Part

if TYPE_CHECKING:
    import keras

# Decay pulls weights to zero; scales, offsets and biases have no reason to be small.
NOT_DECAYED = ["gamma", "beta", "bias"]


class Sgd(Part):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    # Part of a weight that is taken away in a step if the learning rate is 1; not from biases and
    # batch normalisation
    weight_decay: float = Field(5e-4, ge=0)

    def build(self) -> keras.optimizers.Optimizer:
        """Build Keras's SGD with learning rate 0: each step sets its own."""
        import keras

        optimizer = keras.optimizers.SGD(
            0.0,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay or None,
        )
        optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
        return optimizer
