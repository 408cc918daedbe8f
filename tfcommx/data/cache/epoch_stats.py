"""Counts what a dataset serves in each epoch, and how long its consumer waits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class EpochStats:
    """What one dataset served, epoch by epoch.

    Args:
        first_epoch: number of the first epoch, >= 0.
        epochs: how many.
    """

    def __init__(self, first_epoch: int, epochs: int) -> None:
        import tensorflow as tf

        self.first_epoch = first_epoch
        # Per epoch: seconds waited, samples served.
        with tf.device("/cpu:0"):
            self._rows = tf.Variable(tf.zeros([epochs, 2], tf.float64), trainable=False)

    def of(self, epoch: int) -> tuple[float, float]:
        """Return (seconds waited, samples served) of an epoch; zeros for one of another dataset."""
        row = epoch - self.first_epoch
        if not 0 <= row < self._rows.shape[0]:
            return 0.0, 0.0
        waited, served = self._rows[row].numpy().tolist()
        return waited, served

    def recorded(self, batches: Any) -> Any:
        """Return a dataset of (images, labels) from one of (images, labels, epoch), and record it.

        Under `enable_op_determinism`, which has no clock, the seconds are NaN.
        """
        import tensorflow as tf

        clock = tf.timestamp if _has_clock() else lambda: tf.constant(math.nan, tf.float64)

        def deliver(asked: Any, batch: Any) -> Any:
            images, labels, epoch = batch
            row = tf.stack([clock() - asked, tf.cast(tf.shape(labels)[0], tf.float64)])
            recorded = self._rows.scatter_nd_add([[epoch - self.first_epoch]], [row])
            with tf.control_dependencies([recorded]):
                return tf.identity(images), tf.identity(labels)

        # `zip` asks its inputs in turn, in the thread of the consumer: first for the time, then
        # for the batch.
        times = tf.data.Dataset.range(np.iinfo(np.int64).max).map(lambda _: clock())
        return tf.data.Dataset.zip((times, batches)).map(deliver)


def _has_clock() -> bool:
    """Return False under `enable_op_determinism`, where TensorFlow refuses to tell the time."""
    import tensorflow as tf

    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True
