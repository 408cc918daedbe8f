"""Rule `random`: k entries, every choice equally likely. What the other rules must beat."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfcommx.kernels import host
from tfcommx.kernels import select as kernel
from tfcommx.terms import Sparse


@dataclass(frozen=True)
class Random:
    """Any k entries, whatever their magnitudes."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of float [n] at random, NaN and Inf before all else.

        **Ranks:** equal seeds choose equal entries of vectors of equal length, if all are finite.
        **Cost:** a random number an entry, and one selection among those.
        """
        acc = tf.cast(gradient, tf.float32)
        seeds = tf.stack([tf.cast(seed, tf.int64), tf.constant(1, tf.int64)])
        lots = tf.random.stateless_uniform(tf.shape(acc), seeds)
        lots = tf.where(tf.math.is_finite(acc), lots, float("inf"))
        indices = kernel.select(lots, k, seed, "exact").indices
        return Sparse(indices, tf.gather(acc, indices), host.length(gradient))


RULE = Random()
