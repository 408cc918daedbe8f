"""SendsMomentum: what an optimizer has whose momenta travel in place of gradients, from a step on.

    learning   gradients -> [exchange] -> clip -> first and second moments move -> update
    frozen     gradients -> clip -> momenta -> [exchange] -> update; second moments stay

`ExchangesGradients` exchanges by it; `tfcommx.optim` makes a plan for each phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

if TYPE_CHECKING:  # A mixin has what the class has that it is mixed into
    from keras.optimizers import Optimizer as Mixin
else:
    Mixin = object


class SendsMomentum(Mixin):
    """Mixed into an optimizer's class: it has two phases, and knows which one it is in."""

    # int64 scalar, made by `build`: the update after which momenta travel; 0: not yet
    frozen_at: keras.Variable

    def sends_momentum(self, variable: keras.Variable | tf.Variable) -> bool:
        """Return True if this variable's momentum travels once the optimizer is frozen."""
        raise NotImplementedError

    def momenta(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        """Return what travels in the frozen phase: momenta moved by this rank's own gradients.

        Gradients of variables that send no momentum are returned as they are.
        """
        raise NotImplementedError

    def is_frozen(self) -> tf.Tensor:
        """Return a bool scalar: momenta travel in this step."""
        return self.frozen_at.value > 0
