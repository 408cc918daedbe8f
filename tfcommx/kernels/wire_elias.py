"""Ascending indices by Elias-Fano coding: the definition, in plain TensorFlow.

ops/kernels/wire_elias.h has the layout and its source.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import bits, host
from tfcommx.terms.wire_formats import bitmap_bits, low_bits


def encode_definition(indices: tf.Tensor, size: int) -> tf.Tensor:
    """Write int32 [k], ascending in [0, size), as int32 words: the bitmap, then the low bits."""
    k = host.length(indices)
    width, length = low_bits(k, size), bitmap_bits(k, size)
    places = tf.cast(tf.bitwise.right_shift(indices, width), tf.int64) + tf.range(k, dtype=tf.int64)
    bitmap = tf.scatter_nd(places[:, None], tf.ones([k], tf.int32), [length])
    each = tf.bitwise.right_shift(indices[:, None], tf.range(width))
    return tf.concat([bits.pack(bitmap, 1), bits.pack(tf.reshape(each, [-1]), 1)], axis=0)


def decode_definition(bitmap: tf.Tensor, lows: tf.Tensor, k: int, size: int) -> tf.Tensor:
    """Read the k indices of each buffer.

    Args:
        bitmap: int32 [buffers, words], k bits of each row are set.
        lows: int32 [buffers, words].
        k: indices in each buffer.
        size: of the vector that they point into.

    Returns:
        int32 [buffers, k].
    """
    width = low_bits(k, size)
    rows = tf.shape(bitmap)[0]
    places = tf.reshape(tf.where(bits.unpack(bitmap, 1) > 0)[:, 1], [rows, k])
    highs = tf.cast(places - tf.range(k, dtype=tf.int64), tf.int32)
    each = tf.reshape(bits.unpack(lows, 1)[:, : k * width], [rows, k, width])
    low = tf.reduce_sum(tf.bitwise.left_shift(each, tf.range(width)), axis=2)
    return tf.bitwise.left_shift(highs, width) + low
