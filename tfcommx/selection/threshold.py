"""Rule `threshold`: entries whose magnitude reaches a fixed threshold, k of them.

**Source:** Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015.
There, as many travel as reach the threshold; here k always do: a random run of those that reach it
where they are more, and a random run of the others for what is missing where they are fewer.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import reference
from tfcommx.terms import Sparse

THRESHOLD = 1e-3  # in units of the gradient; bind another with functools.partial


def select(gradient: tf.Tensor, k: int, seed: int = 0, threshold: float = THRESHOLD) -> Sparse:
    """Choose k entries of float [n], those of magnitude >= threshold (> 0) before others, NaN and
    Inf before all else.

    **Ranks:** local. **Cost:** some eight passes, no sort of more than k entries.
    """
    acc = tf.cast(gradient, tf.float32)
    bad = ~tf.math.is_finite(acc)
    reaching = ~bad & (tf.abs(acc) >= threshold)
    chosen = _places(bad)[:k]
    for offset, candidates in enumerate((_places(reaching), _places(~bad & ~reaching))):
        need = tf.minimum(k - tf.size(chosen), tf.size(candidates))
        start = reference.below(tf.cast(seed, tf.int64) + offset, tf.size(candidates) - need + 1)
        chosen = tf.concat([chosen, candidates[start : start + need]], 0)
    indices = tf.cast(
        tf.ensure_shape(tf.sort(chosen), [k if isinstance(k, int) else None]), tf.int32
    )
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
    threshold: float = THRESHOLD,
) -> Sparse:
    """Choose k entries of gradient + residual as `select` does; the residual keeps the rest."""
    return reference.error_feedback(
        lambda acc: select(acc, k, seed, threshold), gradient, residual, velocity, momentum
    )


def _places(where: tf.Tensor) -> tf.Tensor:
    return tf.where(where)[:, 0]  # int64: a GPU's int32 would go by the host
