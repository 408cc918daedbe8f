"""An optimizer inside another one: that of a LossScaleOptimizer, and no other."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfcommx.keras_internals.optimizers import has_schedule, inner_optimizer, steps_of


class Lookahead(keras.optimizers.SGD):
    """A user's optimizer that keeps another one under the name that Keras's loss scaling has."""

    def __init__(self, learning_rate: Any = 0.1, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        self.inner_optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9))


def test_a_users_attribute_makes_no_loss_scaling() -> None:
    """Its steps were those of the optimizer in the attribute: 0, and checkpoints said so."""
    optimizer, variable = Lookahead(), keras.Variable([1.0])
    optimizer.apply([tf.constant([1.0])], [variable])
    assert steps_of(optimizer) == 1 and not has_schedule(optimizer)


def test_loss_scaling_has_an_inner_optimizer() -> None:
    inner = keras.optimizers.SGD(0.1)
    assert inner_optimizer(keras.optimizers.LossScaleOptimizer(inner)) is inner
    assert inner_optimizer(inner) is inner
