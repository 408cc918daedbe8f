"""Arrival: a number that exists once tensors do, not only once a GPU has been asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def after(number: tf.Tensor, tensors: Sequence[tf.Tensor], queued: bool) -> tf.Tensor:
    """Return a number >= 1 as it is, on the host, once all tensors exist; in traced code.

    >>> int(after(tf.constant(7, tf.int64), [tf.ones([2])], queued=True))
    7

    A GPU's op ends for TensorFlow once it is queued, and so does a collective of Horovod's with
    HOROVOD_ENABLE_ASYNC_COMPLETION. An entry that has been copied to the host cannot have come
    before what was queued on the GPU earlier.

    Args:
        number: int64 or float64 [], >= 1.
        tensors: of any shapes, floats the first that is not empty.
        queued: whether an op that makes one of them may end before it exists; without it nothing is
            copied.

    **Ranks:** local. **Cost:** with `queued` one entry is copied to the host; nothing waits for it
    but the result.
    """
    entries = [one for one in tensors if one.shape.num_elements() != 0]
    if not queued or not entries:
        with tf.control_dependencies([tf.group(*tensors)]), tf.device("/cpu:0"):
            return tf.identity(number)
    with tf.control_dependencies([tf.group(*tensors)]):
        entry = tf.reshape(entries[0], [-1])[0]
    with tf.device("/cpu:0"):
        # An op that only waits for the copy would be replaced by one that waits for the GPU's op
        return tf.maximum(number, tf.cast(tf.math.is_finite(entry), number.dtype))
