"""SyncBatchNormalization: batch normalization over the joint batch of all ranks.

                 this rank                               all ranks
forward   x -> count, sum, sum of squares  -> allreduce -> mean, variance -> Keras normalizes
backward  gradients of mean and variance   -> allreduce -> gradient of x, from this rank's x
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.collectives.comm import WatchedSum
from tfcommx.keras_internals.models import OwnMoments


@keras.saving.register_keras_serializable("tfcommx")
class SyncBatchNormalization(OwnMoments):
    """Normalize by mean and variance of the batches of all ranks together, not of each rank's own.

    Use it for small batches a rank, whose own statistics are noisy. It trains as one process
    with the joint batch would: outputs, gradients and moving averages are equal, also if ranks have
    batches of unequal sizes or masked entries. Evaluation uses the moving averages, which are equal
    on all ranks, and exchanges nothing. Frozen (`trainable=False`) it exchanges nothing, too.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> layer = cx.layers.SyncBatchNormalization(momentum=0.9)
    >>> layer(keras.ops.array([[0.0], [2.0]]), training=True).numpy().round(2).tolist()
    [[-1.0], [1.0]]

    The config is that of `keras.layers.BatchNormalization`, so a model can be changed from one to
    the other, and weights saved with one load into the other:

    >>> def synchronized(layer):
    ...     if isinstance(layer, keras.layers.BatchNormalization):
    ...         return cx.layers.SyncBatchNormalization.from_config(layer.get_config())
    ...     return type(layer).from_config(layer.get_config())
    >>> plain = keras.Sequential([keras.layers.Input((3,)), keras.layers.BatchNormalization()])
    >>> model = keras.models.clone_model(plain, clone_function=synchronized)
    >>> model.set_weights(plain.get_weights())

    Keras's own `BatchNormalization(synchronized=True)` knows the replicas of tf.distribute alone,
    not ranks of Horovod.

    Args:
        those of `keras.layers.BatchNormalization`. `synchronized` changes nothing.

    **Ranks:** all, in each call in training: layers in the same order, as one script makes them.
    Not for strategies with which ranks take separate steps (ElasticAveraging); `cx.profile` of
    such a model in one process.
    **Cost:** of c channels in training: one allreduce of 2 c + 1 float64 in the forward pass (3 c
    with a mask), and one of 2 c float32 in the backward pass. The step waits for both, so
    on a slow network they cost two latencies a layer and step.
    **Raises:** LaunchError in training before init().
    **Source:** Zhang, Dana, Shi, Zhang, Wang, Tyagi, Agrawal, "Context Encoding for Semantic
    Segmentation" (2018), section 3.2. Sums are of float64, because E[x^2] - E[x]^2 of float32 loses
    the variance of channels with a large mean.
    """

    # Its collectives, of the forward and the backward pass
    _statistics: WatchedSum | None = None
    _gradient: WatchedSum | None = None

    def moments(
        self, inputs: tf.Tensor, axes: list[int], mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean and variance of each channel over all ranks. **Ranks:** all."""
        # Not in the constructor, because models may be made and loaded before init()
        if self._statistics is None or self._gradient is None:
            self._statistics = self._watched_sum("statistics")
            self._gradient = self._watched_sum("gradient")
        statistics, sum_gradient, counted = self._statistics, self._gradient, None
        if mask is not None:
            mask = tf.cast(mask, tf.bool)[..., tf.newaxis]
            counted = tf.broadcast_to(mask, tf.shape(inputs))

        @tf.custom_gradient
        def over_ranks(
            values: tf.Tensor,
        ) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
            count, mean, variance = _over_ranks(values, axes, counted, statistics)

            def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
                gradients = sum_gradient(tf.stack([of_mean, of_variance]))
                gradients = tf.math.divide_no_nan(gradients, tf.cast(count, gradients.dtype))
                of_mean, of_variance = (
                    _along(part, values, axes) for part in tf.unstack(gradients)
                )
                # The derivatives of mean and variance by an entry are 1 / count and 2 (x - mean) /
                # count
                result = of_mean + 2 * of_variance * (values - _along(mean, values, axes))
                return result if counted is None else tf.where(counted, result, 0)

            return (mean, variance), gradient

        mean, variance = over_ranks(inputs)
        return mean, variance

    def _watched_sum(self, name: str) -> WatchedSum:
        return WatchedSum(process.current(), name, f"the {name} of {self.path!r}")


def _over_ranks(
    values: tf.Tensor, axes: list[int], counted: tf.Tensor | None, statistics: WatchedSum
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the number of entries of a channel that count, float64, their mean and variance."""
    if counted is None:
        mean, variance = tf.nn.moments(values, axes)
        count = tf.reduce_prod(tf.gather(tf.shape(values, tf.int64), axes))[tf.newaxis]
    else:
        count = tf.reduce_sum(tf.cast(counted, values.dtype), axes)
        mean = tf.math.divide_no_nan(tf.reduce_sum(tf.where(counted, values, 0), axes), count)
        away = tf.where(counted, values - _along(mean, values, axes), 0)
        variance = tf.math.divide_no_nan(tf.reduce_sum(away**2, axes), count)
    count, mean, variance = (tf.cast(part, tf.float64) for part in (count, mean, variance))
    # A rank without rows has a count of 0, and NaN for mean and variance
    sums = [tf.math.multiply_no_nan(part, count) for part in (mean, variance + mean**2)]
    flat = tf.concat([count, *sums], axis=0)
    flat = statistics(flat)
    channels = mean.shape[0]
    count, total, squares = tf.split(flat, [count.shape[0], channels, channels])
    mean = tf.math.divide_no_nan(total, count)
    # Rounding can make the difference negative where all entries are equal
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - mean**2, 0)
    return count, tf.cast(mean, values.dtype), tf.cast(variance, values.dtype)


def _along(statistic: tf.Tensor, values: tf.Tensor, axes: list[int]) -> tf.Tensor:
    """Return a number of each channel in a shape that broadcasts along the values."""
    return tf.reshape(statistic, [1 if axis in axes else -1 for axis in range(len(values.shape))])


__all__ = ["SyncBatchNormalization"]
