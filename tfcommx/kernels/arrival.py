"""Arrival: a number that exists once tensors do, not only once a GPU has been asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def after(number: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a number >= 1 as it is, on the host, once all tensors exist; in traced code.

    >>> int(after(tf.constant(7, tf.int64), [tf.ones([2])]))
    7

    A GPU's op ends for TensorFlow once it is queued, and so does a collective of Horovod's with
    HOROVOD_ENABLE_ASYNC_COMPLETION. An entry that has been copied to the host cannot have come
    before what was queued on the GPU earlier.

    Args:
        number: int64 or float64 [], >= 1.
        tensors: of any shapes that are known while tracing, of numbers or bools.

    **Ranks:** local. **Cost:** one entry is copied to the host; only the result waits for it.
    """
    entries = [one for one in tensors if one.shape.num_elements() != 0]
    if not entries:
        with tf.control_dependencies([tf.group(*tensors)]), tf.device("/cpu:0"):
            return tf.identity(number)
    with tf.control_dependencies([tf.group(*tensors)]):
        entry = tf.reshape(entries[0], [-1])[0]
    with tf.device("/cpu:0"):
        there = tf.math.is_finite(tf.cast(entry, tf.float32))  # True or false, so 1 at most
        # An op that only waits for the copy would be replaced by one that waits for the GPU's op
        return tf.maximum(number, tf.cast(there, number.dtype))
