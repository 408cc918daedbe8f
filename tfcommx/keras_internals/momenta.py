"""Mixins for optimizers that exchange momenta in place of gradients.

`SendsMomentum`, in every step:

    gradients -> clip -> momenta -> [exchange] -> weights follow

`LearnsThenSendsMomentum`, a variant of Adam, from some step on:

    learning   gradients -> [exchange] -> clip -> Adam: moments move, weights follow -> freeze?
    frozen     gradients -> clip -> momenta -> [exchange] -> weights follow; second moments stay

`ExchangesGradients` calls their `exchange_and_clip`; `tfcommx.optim` makes the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import keras
import tensorflow as tf

from tfcommx.keras_internals.optimizers import require_one_replica

if TYPE_CHECKING:  # A mixin has the members of the class that it is mixed into
    from keras.optimizers import Adam as Mixin
else:
    Mixin = object

# A function of tensors in the order of the variables
OfAll = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]


class SendsMomentum(Mixin):
    """Mixed into a subclass of a Keras optimizer with momentum.

    The class has `sends_momentum(variable)`: True if this variable's momentum is exchanged;
    `moved(gradient, variable)`: this rank's own gradient plus the momentum in the unit of
    gradients; and `update_by_momenta(received, variables, learning_rate)`: the update by the mean
    of these over the ranks.
    """

    # Wire format of an entry if no scheme is given
    default_wire: ClassVar[str]

    def momenta(
        self, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        """Return the tensors to exchange: updated momenta, or gradients of other variables."""
        return [
            self.moved(gradient, variable) if self.sends_momentum(variable) else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    # AutoGraph must not convert graph code, even inside a caller's loop
    @tf.autograph.experimental.do_not_convert
    def exchange_and_clip(
        self,
        gradients: list[tf.Tensor],
        variables: Sequence[keras.Variable],
        exchange: OfAll,
        clip: OfAll,
    ) -> Sequence[tf.Tensor]:
        """Clip each rank's own gradients; exchange the momenta updated with them."""
        return exchange(self.momenta(clip(gradients), variables))

    def position_of(self, variable: keras.Variable | tf.Variable) -> int:
        """Return the position of a variable among those that the optimizer was built for."""
        position: int = self._get_variable_index(variable)
        return position

    @tf.autograph.experimental.do_not_convert
    def _backend_update_step(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable],
        learning_rate: Any,
    ) -> None:
        require_one_replica(self)
        dense = list(map(tf.convert_to_tensor, grads))
        # In the last call of an iterator, which has no data, nothing here may run.
        with tf.control_dependencies(dense[-1:]):
            self._update(dense, trainable_variables, learning_rate)

    def _update(
        self,
        received: list[tf.Tensor],
        variables: Sequence[keras.Variable],
        learning_rate: Any,
    ) -> None:
        self.update_by_momenta(received, variables, learning_rate)


class LearnsThenSendsMomentum(SendsMomentum):
    """Mixed into a subclass of Keras's Adam with two phases.

    In addition to the methods that SendsMomentum needs, the class has
    `freeze_if_due(learning_rate)`, called after each update of the learning phase.
    """

    # int64 scalar, made by `build`: the update after which momenta are exchanged; 0: not yet
    frozen_at: keras.Variable
    # Wire format of gradients while second moments are learnt
    learning_wire: str

    def is_frozen(self) -> tf.Tensor:
        """Return a bool scalar, True if momenta are exchanged in this step."""
        return self.frozen_at.value > 0

    def momentum_of(self, variable: keras.Variable | tf.Variable) -> tf.Variable:
        """Return Adam's first moment of a variable."""
        return self._momentums[self.position_of(variable)].value

    def second_moment_of(self, variable: keras.Variable | tf.Variable) -> tf.Variable:
        """Return Adam's second moment of a variable."""
        return self._velocities[self.position_of(variable)].value

    @tf.autograph.experimental.do_not_convert
    def exchange_and_clip(
        self,
        gradients: list[tf.Tensor],
        variables: Sequence[keras.Variable],
        exchange: OfAll,
        clip: OfAll,
    ) -> Sequence[tf.Tensor]:
        """Exchange gradients, then clip; or clip, then exchange the momenta updated with them."""
        if not self._clips():
            frozen = self.is_frozen()
            return exchange(
                [self._sent(*pair, frozen) for pair in zip(gradients, variables, strict=True)]
            )
        # In the last call of an iterator, which has no data, nothing here may run.
        with tf.control_dependencies(gradients[-1:]):
            frozen = self.is_frozen()
        sent = tf.cond(
            frozen,
            lambda: self.momenta(clip(gradients), variables),
            lambda: list(map(tf.identity, gradients)),
        )
        received = exchange(sent)
        result: Sequence[tf.Tensor] = tf.cond(
            frozen, lambda: list(map(tf.identity, received)), lambda: clip(list(received))
        )
        return result

    def _clips(self) -> bool:
        return bool(self.clipnorm or self.clipvalue or self.global_clipnorm)

    def _sent(self, gradient: tf.Tensor, variable: keras.Variable, frozen: tf.Tensor) -> tf.Tensor:
        """Return the tensor to exchange for one variable, as soon as its gradient exists."""
        if not self.sends_momentum(variable):
            return gradient
        return tf.cond(
            frozen, lambda: self.moved(gradient, variable), lambda: tf.identity(gradient)
        )

    def _update(
        self,
        received: list[tf.Tensor],
        variables: Sequence[keras.Variable],
        learning_rate: Any,
    ) -> None:
        by_adam = super(SendsMomentum, self)._backend_update_step

        def learn() -> None:
            by_adam(received, variables, learning_rate)
            self.freeze_if_due(learning_rate)
            exchanger = getattr(self, "exchanger", None)
            if exchanger is not None and self._clips():
                # They come from gradients before the clipping, and may be larger than clipped ones
                tf.cond(self.is_frozen(), exchanger.drop_residuals_of_momenta, lambda: None)

        tf.cond(
            self.is_frozen(),
            lambda: self.update_by_momenta(received, variables, learning_rate),
            learn,
        )
