"""Rule `all`: every entry travels. The identity of the family."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfcommx.kernels import host
from tfcommx.terms import PlanError, Sparse


@dataclass(frozen=True)
class All:
    """Every entry, whatever its magnitude."""

    def select(self, gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
        """Choose all n entries of the gradient.

        Args:
            gradient: float [n].
            k: n.
            seed: not used.

        **Cost:** one pass at most.
        **Raises:** PlanError if k is not n.
        """
        size = host.length(gradient)
        if isinstance(size, int) and isinstance(k, int) and k != size:
            raise PlanError(
                f"Rule 'all' needs k = n. Received k={k}, n={size}. Use density 1, or another rule."
            )
        # Counted in int64: TensorFlow's int32 range would be made in the host's memory for a GPU
        indices = tf.cast(tf.range(tf.size(gradient, tf.int64)), tf.int32)
        return Sparse(indices, tf.cast(gradient, tf.float32), size)


RULE = All()
