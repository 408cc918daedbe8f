"""Rule `random`: k entries, every choice of k equally likely whatever their magnitudes. What the
other rules must beat.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import native, reference
from tfcommx.terms import Sparse


def select(gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
    """Choose k entries of float [n] at random, NaN and Inf before all else.

    **Ranks:** equal seeds choose equal entries of vectors of equal length, where all are finite.
    **Cost:** a random number an entry, and one selection among those.
    """
    acc = tf.cast(gradient, tf.float32)
    seeds = tf.stack([tf.cast(seed, tf.int64), tf.constant(1, tf.int64)])
    lots = tf.random.stateless_uniform(tf.shape(acc), seeds)
    lots = tf.where(tf.math.is_finite(acc), lots, float("inf"))
    indices = native.select(lots, k, seed, "exact").indices
    return Sparse(
        indices,
        tf.gather(acc, indices),
        gradient.shape[0] if gradient.shape[0] is not None else tf.size(gradient),
    )


def select_with_residual(
    gradient: tf.Tensor,
    residual: tf.Variable,
    k: int,
    seed: int = 0,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Choose k entries of gradient + residual at random; the residual keeps the rest."""
    return reference.error_feedback(
        lambda acc: select(acc, k, seed), gradient, residual, velocity, momentum
    )
