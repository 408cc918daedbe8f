"""Local gradient clipping: what is done to a rank's gradients before they are accumulated.

Error feedback and momentum are part of every rule (`select_with_residual`), because the kernels
fuse them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfcommx.terms import PlanError


def clip_before_accumulation(
    gradients: Sequence[tf.Tensor], norm: float, ranks: int, operation: str = "sum"
) -> list[tf.Tensor]:
    """Scale a rank's gradients together so that the sum (or average) over independent ranks has a
    norm of about `norm` at most.

    Gradients of independent ranks add up as their squares do, so the limit of one rank is norm /
    sqrt(ranks) for "sum", and norm * sqrt(ranks) for "average", which divides by the number of
    ranks afterwards. Where the joint norm is NaN or infinite, all pass unchanged.

    Args: gradients float, any shapes; norm > 0; ranks >= 1; operation "sum" or "average".
    **Ranks:** local. **Cost:** two passes; no gradient leaves before the last one is there.
    **Raises:** PlanError.
    **Source:** Lin et al., Deep Gradient Compression, 2018, section 3.3, where the sum is of
    gradients divided by the ranks.
    """
    if norm <= 0 or ranks < 1:
        raise PlanError(
            f"Clipping needs norm > 0 and ranks >= 1. Received norm={norm}, ranks={ranks}."
        )
    limit = norm * ranks ** (0.5 if operation == "average" else -0.5)
    length = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in gradients])
    scale = tf.where(tf.math.is_finite(length) & (length > limit), limit / length, 1.0)

    def scaled(gradient: tf.Tensor) -> tf.Tensor:
        # float16 may not hold the scale
        wide = tf.float32 if gradient.dtype.size < 4 else gradient.dtype
        return tf.cast(tf.cast(gradient, wide) * tf.cast(scale, wide), gradient.dtype)

    return [scaled(gradient) for gradient in gradients]
