"""SendsMomentum: mixed into a kind of Adam whose momenta travel from some step on.

    learning   gradients -> [exchange] -> clip -> Adam: moments move, weights follow -> freeze?
    frozen     gradients -> clip -> momenta -> [exchange] -> weights follow; second moments stay

`ExchangesGradients` exchanges by it; `tfcommx.optim` makes a plan for each phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfcommx.keras_internals.optimizers import require_one_replica

if TYPE_CHECKING:  # A mixin has what the class has that it is mixed into
    from keras.optimizers import Adam as Mixin
else:
    Mixin = object


class SendsMomentum(Mixin):
    """Mixed into a subclass of Keras's Adam: it has two phases.

    The class has `sends_momentum(variable)`: True if this variable's momentum travels;
    `momenta(gradients, variables)`: what travels in the frozen phase, the momenta that this rank's
    own gradients have moved, and the gradients of other variables; `update_frozen(received,
    variables, learning_rate)`: the update by what was received; and `freeze_if_due(learning_rate)`:
    called after each update of the learning phase.
    """

    # int64 scalar, made by `build`: the update after which momenta travel; 0: not yet
    frozen_at: keras.Variable

    def is_frozen(self) -> tf.Tensor:
        """Return a bool scalar: momenta travel in this step."""
        return self.frozen_at.value > 0

    def momentum_of(self, variable: keras.Variable | tf.Variable) -> tf.Variable:
        """Return Adam's first moment of a variable."""
        return self._momentums[self._get_variable_index(variable)].value

    def second_moment_of(self, variable: keras.Variable | tf.Variable) -> tf.Variable:
        """Return Adam's second moment of a variable."""
        return self._velocities[self._get_variable_index(variable)].value

    # What follows is a graph already, also in a caller's loop.
    @tf.autograph.experimental.do_not_convert
    def _backend_update_step(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable],
        learning_rate: Any,
    ) -> None:
        require_one_replica(self)
        dense, by_adam = list(map(tf.convert_to_tensor, grads)), super()._backend_update_step

        def learn() -> None:
            by_adam(dense, trainable_variables, learning_rate)
            self.freeze_if_due(learning_rate)

        # In the last call of an iterator, which has no data, nothing here may run.
        with tf.control_dependencies(dense[-1:]):
            tf.cond(
                self.is_frozen(),
                lambda: self.update_frozen(dense, trainable_variables, learning_rate),
                learn,
            )
