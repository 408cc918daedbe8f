"""Rule `all`: every entry travels. The identity of the family: with it, a sparse route sums as a
dense one does.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import reference
from tfcommx.terms import PlanError, Sparse


def select(gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
    """Choose all n entries of the gradient; k must be n. **Cost:** one pass at most. **Raises:**
    PlanError for another k.
    """
    size = gradient.shape[0] if gradient.shape[0] is not None else tf.size(gradient)
    if isinstance(size, int) and isinstance(k, int) and k != size:
        raise PlanError(
            f"Rule 'all' needs k = n. Received k={k}, n={size}. Use density 1, or another rule."
        )
    return Sparse(tf.range(tf.size(gradient)), tf.cast(gradient, tf.float32), size)


def select_with_residual(
    gradient: tf.Tensor,
    residual: tf.Variable,
    k: int,
    seed: int = 0,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Choose all n entries of gradient + residual; nothing stays, but where the sum is NaN or Inf
    what was there before does.

    **Cost:** some five passes. **Raises:** PlanError where k is not n.
    """
    return reference.error_feedback(
        lambda acc: select(acc, k, seed), gradient, residual, velocity, momentum
    )
