"""Mixins for optimizers that exchange momenta in place of gradients.

`SendsMomentum`, in every step:

    gradients -> clip -> + momentum -> [exchange] -> - momentum -> the optimizer's own update

`LearnsThenSendsMomentum`, a variant of Adam or LAMB, from some step on:

    learning   gradients -> [exchange] -> clip -> Adam: moments move, weights follow -> freeze?
    frozen     gradients -> clip -> + momentum -> [exchange] -> moments and weights follow

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

    The class has `sends_momentum(variable)`: True if this variable's momentum is exchanged; and
    `carried(variable)`: the momentum, as a tensor in the unit of gradients. All ranks have equal
    ones, so the mean of gradients plus momentum is the mean gradient plus momentum.
    """

    # Wire format of an entry if no scheme is given
    default_wire: ClassVar[str]
    # True if `carried` divides the momentum by the learning rate
    divides_by_rate: ClassVar[bool] = False

    def moved(self, gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        """Return this rank's gradient plus the momentum; the gradient if no momentum is sent."""
        if not self.sends_momentum(variable):
            return gradient
        carried = self.carried(variable)
        # In the momentum's dtype, because a 16-bit sum would lose the smaller of the two
        return tf.cast(gradient, carried.dtype) + carried

    # AutoGraph must not convert graph code, even inside a caller's loop
    @tf.autograph.experimental.do_not_convert
    def exchange_and_clip(
        self,
        gradients: list[tf.Tensor],
        variables: Sequence[keras.Variable],
        exchange: OfAll,
        clip: OfAll,
    ) -> Sequence[tf.Tensor]:
        """Clip each rank's own gradients; return their mean, exchanged with the momenta."""
        received = exchange(list(map(self.moved, clip(gradients), variables)))
        return [
            result - self.carried(variable) if self.sends_momentum(variable) else result
            for result, variable in zip(received, variables, strict=True)
        ]

    def position_of(self, variable: keras.Variable | tf.Variable) -> int:
        """Return the position of a variable among those that the optimizer was built for."""
        position: int = self._get_variable_index(variable)
        return position

    @property
    def is_wrapped(self) -> bool:
        """True if `cx.DistributedOptimizer` has wrapped this optimizer, which then exchanges."""
        return getattr(self, "exchanger", None) is not None


class LearnsThenSendsMomentum(SendsMomentum):
    """Mixed into a subclass of Keras's Adam, or of LAMB, with two phases.

    In addition to the methods that SendsMomentum needs, the class has
    `freeze_if_due(learning_rate)`, called after each update of the learning phase, and
    `update_by_momenta(received, variables, learning_rate)`, the update in the second phase by the
    mean over the ranks of `moved`.
    """

    # int64 scalar, made by `build`: the update after which momenta are exchanged; 0: not yet
    frozen_at: keras.Variable
    # Wire format of gradients while second moments are learnt
    learning_wire: str

    def is_frozen(self) -> tf.Tensor:
        """Return a bool scalar, True if momenta are exchanged in this step."""
        return self.frozen_at.value > 0

    def momentum_of(self, variable: keras.Variable | tf.Variable) -> tf.Variable:
        return self._momentums[self.position_of(variable)].value

    def second_moment_of(self, variable: keras.Variable | tf.Variable) -> tf.Variable:
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
        # Sent one by one, as soon as each exists, because only clipping needs all of them
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
            lambda: list(map(self.moved, clip(gradients), variables)),
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

    @tf.autograph.experimental.do_not_convert
    def _backend_update_step(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable],
        learning_rate: Any,
    ) -> None:
        require_one_replica(self)
        by_gradients, dense = super()._backend_update_step, list(map(tf.convert_to_tensor, grads))

        def learn() -> None:
            by_gradients(dense, trainable_variables, learning_rate)
            self.freeze_if_due(learning_rate)
            if self.is_wrapped and self._clips():
                # They come from gradients before the clipping, and may be larger than clipped ones
                drop = self.exchanger.drop_residuals_of_momenta
                tf.cond(self.is_frozen(), drop, lambda: None)

        def follow() -> None:
            moved = dense
            if not self.is_wrapped:
                moved = list(map(self.moved, dense, trainable_variables))
            self.update_by_momenta(moved, trainable_variables, learning_rate)

        # In the last call of an iterator, which has no data, nothing here may run.
        with tf.control_dependencies(dense[-1:]):
            tf.cond(self.is_frozen(), follow, learn)
