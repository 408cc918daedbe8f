"""Rule `dgc`: double sampling. A sample gives a threshold; of what reaches it, the k largest go.

**Source:** Lin et al., Deep Gradient Compression, 2018, section 5. There, fewer than k entries
travel if the sample's threshold is too high; here k always do: the threshold is aimed a quarter
low, and if that fails, all entries compete.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfcommx.kernels import host
from tfcommx.terms import Sparse


@dataclass(frozen=True)
class Dgc:
    """The k largest of the entries that a sampled threshold lets through."""

    # Share of the entries that is sampled, as in the paper
    sampled: float = 0.01
    # Entries in a sample, at least: fewer tell nothing of a density of 0.001
    at_least: int = 1024
    # The sample's threshold is one that this many times k entries should reach
    margin: float = 1.25

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of float [n] by double sampling.

        **Ranks:** local.
        **Cost:** three passes, a sample, and a partial sort of about 1.25 k entries on one thread;
        of all n if the sample misled.
        """
        acc = tf.cast(gradient, tf.float32)
        magnitude = _magnitude(acc)
        # Int64: TensorFlow moves a GPU's int32 through the host
        reaching = tf.where(magnitude >= self._threshold(magnitude, k, seed))[:, 0]
        reaching = tf.cond(
            tf.size(reaching) >= k,
            lambda: reaching,
            lambda: tf.range(tf.cast(tf.size(acc), tf.int64)),
        )
        largest = tf.math.top_k(tf.gather(magnitude, reaching), k).indices
        indices = tf.cast(tf.sort(tf.gather(reaching, largest)), tf.int32)
        return Sparse(indices, tf.gather(acc, indices), host.length(gradient))

    def _threshold(self, magnitude: tf.Tensor, k: int, seed: int) -> tf.Tensor:
        """Return the magnitude that about margin * k entries reach, as a sample tells."""
        size = tf.size(magnitude)
        samples = tf.cast(self.sampled * tf.cast(size, tf.float32), tf.int32)
        samples = tf.maximum(samples, self.at_least)
        seeds = tf.stack([tf.cast(seed, tf.int64), tf.constant(0, tf.int64)])
        drawn = tf.random.stateless_uniform([samples], seeds, 0, tf.maximum(size, 1), tf.int32)
        share = tf.cast(k, tf.float32) / tf.cast(tf.maximum(size, 1), tf.float32)
        rank = tf.math.ceil(self.margin * share * tf.cast(samples, tf.float32))
        rank = tf.clip_by_value(tf.cast(rank, tf.int32), 1, samples)
        return tf.reduce_min(tf.math.top_k(tf.gather(magnitude, drawn), rank).values)


def _magnitude(x: tf.Tensor) -> tf.Tensor:
    """Return |x|, with infinity for NaN, as float32 [n]; denormals may all compare as zero."""
    return tf.where(tf.math.is_finite(x), tf.abs(x), float("inf"))


RULE = Dgc()
