"""Rule `dgc`: double sampling. A sample gives a threshold; of what reaches it, the k largest are
chosen.

**Source:** Lin et al., Deep Gradient Compression, 2018, section 5. There, fewer than k entries
travel where the sample's threshold is too high; here k always do: the threshold is aimed a quarter
low, and where that fails, all entries compete.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import reference
from tfcommx.terms import Sparse

SAMPLED = 0.01  # of the entries, as in the paper
AT_LEAST = 1024  # entries in a sample: fewer tell nothing of a density of 0.001
MARGIN = 1.25  # the sample's threshold is one that this many times k entries should reach


def select(gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
    """Choose k entries of float [n] by double sampling.

    **Ranks:** local. **Cost:** three passes, a sample, and a partial sort of about 1.25 k entries
    on one thread; of all n where the sample misled.
    """
    acc = tf.cast(gradient, tf.float32)
    size = tf.size(acc)
    magnitude = reference.magnitude(acc)
    samples = tf.maximum(tf.cast(SAMPLED * tf.cast(size, tf.float32), tf.int32), AT_LEAST)
    seeds = tf.stack([tf.cast(seed, tf.int64), tf.constant(0, tf.int64)])
    places = tf.random.stateless_uniform([samples], seeds, 0, tf.maximum(size, 1), tf.int32)
    share = tf.cast(k, tf.float32) / tf.cast(tf.maximum(size, 1), tf.float32)
    rank = tf.cast(tf.math.ceil(MARGIN * share * tf.cast(samples, tf.float32)), tf.int32)
    threshold = tf.reduce_min(
        tf.math.top_k(tf.gather(magnitude, places), tf.clip_by_value(rank, 1, samples)).values
    )
    reaching = tf.where(magnitude >= threshold)[:, 0]  # int64: a GPU's int32 would go by the host
    reaching = tf.cond(
        tf.size(reaching) >= k, lambda: reaching, lambda: tf.range(tf.cast(size, tf.int64))
    )
    indices = tf.cast(
        tf.sort(tf.gather(reaching, tf.math.top_k(tf.gather(magnitude, reaching), k).indices)),
        tf.int32,
    )
    return Sparse(
        indices,
        tf.gather(acc, indices),
        gradient.shape[0] if gradient.shape[0] is not None else size,
    )


def select_with_residual(
    gradient: tf.Tensor,
    residual: tf.Variable,
    k: int,
    seed: int = 0,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Choose k entries of gradient + residual by double sampling; the residual keeps the rest."""
    return reference.error_feedback(
        lambda acc: select(acc, k, seed), gradient, residual, velocity, momentum
    )
