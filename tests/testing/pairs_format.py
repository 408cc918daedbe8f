"""A wire format of another package, "pairs_format:PAIRS"."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcommx.core import Sparse
from tfcommx.wire.formats import WireFormat


class Pairs(WireFormat):
    """Indices, and values in bfloat16."""

    def words(self, k: int, size: int) -> int:
        return k + (k + 1) // 2

    def rounded(self, values: tf.Tensor) -> Any:
        finite = tf.math.is_finite(values)
        written = tf.cast(tf.cast(values, tf.bfloat16), tf.float32)
        return written, tf.where(finite, values - written, tf.zeros_like(values))

    def encode(self, sparse: Sparse) -> tf.Tensor:
        halves = tf.bitcast(tf.cast(sparse.values, tf.bfloat16), tf.int16)
        padded = tf.pad(halves, [[0, halves.shape[0] % 2]])
        return tf.concat([sparse.indices, tf.bitcast(tf.reshape(padded, [-1, 2]), tf.int32)], 0)

    def decode(self, words: tf.Tensor, k: int, size: int) -> Any:
        halves = tf.reshape(tf.bitcast(words[:, k:], tf.bfloat16), [-1, k + k % 2])
        return words[:, :k], tf.cast(halves[:, :k], tf.float32)


PAIRS = Pairs()
