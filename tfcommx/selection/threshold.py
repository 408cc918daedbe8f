"""Rule `threshold`: entries whose magnitude reaches a fixed threshold, k of them.

**Source:** Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015.
There, as many travel as reach the threshold; here k always do: a random run of those that reach it
if they are more, and a random run of the others for what is missing if they are fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfcommx.kernels import host
from tfcommx.kernels.select import below
from tfcommx.terms import Sparse


@dataclass(frozen=True)
class Threshold:
    """Those that reach a threshold first, then others."""

    # Magnitude, in units of the gradient, > 0
    threshold: float = 1e-3

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose k entries of float [n], NaN and Inf before all else.

        **Ranks:** local.
        **Cost:** some eight passes, no sort of more than k entries.
        """
        acc = tf.cast(gradient, tf.float32)
        bad = ~tf.math.is_finite(acc)
        reaching = ~bad & (tf.abs(acc) >= self.threshold)
        chosen = _positions(bad)[:k]
        for offset, candidates in enumerate((_positions(reaching), _positions(~bad & ~reaching))):
            need = tf.minimum(k - tf.size(chosen), tf.size(candidates))
            start = below(tf.cast(seed, tf.int64) + offset, tf.size(candidates) - need + 1)
            chosen = tf.concat([chosen, candidates[start : start + need]], 0)
        ascending = tf.ensure_shape(tf.sort(chosen), [k if isinstance(k, int) else None])
        indices = tf.cast(ascending, tf.int32)
        return Sparse(indices, tf.gather(acc, indices), host.length(gradient))


def _positions(mask: tf.Tensor) -> tf.Tensor:
    return tf.where(mask)[:, 0]  # Int64: TensorFlow moves a GPU's int32 through the host


RULE = Threshold()
