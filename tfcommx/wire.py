"""How selected entries are written: a Sparse as one flat buffer of exact size, and back.

Format `pair32`: int32[2 k], the k indices, then the bits of the k float32 values. One buffer, so one collective.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx import native
from tfcommx.terms import Sparse


def size_bytes(k: int) -> int:
    """Return the bytes of k entries: 4 for an index, 4 for a value."""
    return 8 * k


def encode(sparse: Sparse) -> tf.Tensor:
    """Write k entries as int32[2 k]. **Cost:** one copy of 8 k bytes."""
    return tf.concat([sparse.indices, tf.bitcast(sparse.values, tf.int32)], axis=0)


def merge(buffers: tf.Tensor, k: int, size: int) -> tf.Tensor:
    """Add the entries of all gathered buffers into a dense float32[size], in rank order, so that every rank gets the same bits.

    Args:
        buffers: int32[p * 2 k], the buffers of p ranks one after another.
        k: entries in each buffer.
        size: length of the vector that the indices point into.
    """
    parts = tf.reshape(buffers, [-1, 2, k])
    values = tf.bitcast(parts[:, 1], tf.float32)
    return native.merge(tf.reshape(parts[:, 0], [-1]), tf.reshape(values, [-1]), size)
