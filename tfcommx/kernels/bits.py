"""Numbers of a few bits, packed into int32 words from the lowest bit on: plain TensorFlow."""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import host


def pack(numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Write the lowest bits of numbers one after another.

    >>> pack(tf.constant([1, 2, -1]), 4).numpy().tolist()
    [3873]

    Args:
        numbers: int32 [n].
        width: bits of each, a divisor of 32.

    Returns:
        int32 [ceil(n * width / 32)]; the bits at the end are zero.

    **Ranks:** local.
    """
    count = 32 // width
    padded = tf.pad(numbers, [[0, -host.length(numbers) % count]])
    low = tf.bitwise.bitwise_and(tf.reshape(padded, [-1, count]), _mask(width))
    # No two have a bit in common, so their sum has them all; it may be negative
    return tf.reduce_sum(tf.bitwise.left_shift(low, tf.range(0, 32, width)), axis=1)


def unpack(words: tf.Tensor, width: int) -> tf.Tensor:
    """Read what `pack` wrote.

    >>> unpack(tf.constant([[3873]]), 4)[0, :4].numpy().tolist()
    [1, 2, 15, 0]

    Args:
        words: int32 [rows, n].
        width: bits of each number, a divisor of 32.

    Returns:
        int32 [rows, n * 32 / width], none negative unless `width` is 32.

    **Ranks:** local.
    """
    shifted = tf.bitwise.right_shift(words[:, :, None], tf.range(0, 32, width))
    low = tf.bitwise.bitwise_and(shifted, _mask(width))
    return tf.reshape(low, [tf.shape(words)[0], words.shape[1] * (32 // width)])


def _mask(width: int) -> int:
    return (1 << width) - 1 if width < 32 else -1
