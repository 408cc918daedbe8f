"""A batch normalization layer whose subclass computes the batch statistics."""

from __future__ import annotations

import keras
import tensorflow as tf


class OwnMoments(keras.layers.BatchNormalization):
    """Batch normalization whose subclass computes the mean and variance of a batch.

    All else is Keras's: moving averages, scale and offset, renorm, float32 for inputs of 16 bits.
    """

    def moments(
        self, inputs: tf.Tensor, axes: list[int], mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean and variance of each channel, [channels], in the dtype of the inputs.

        Args:
            inputs: float32 or float64, any shape.
            axes: all but the channels'.
            mask: which entries count, with the shape of the inputs without its last axis; None:
                all.
        """
        raise NotImplementedError

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        return self.moments(inputs, self._reduction_axes, mask)
