"""Clip a rank's own gradients before they enter its residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfcommx.terms import Plan, PlanError


def clip_before_accumulation(
    gradients: Sequence[tf.Tensor], norm: float, ranks: int, operation: str = "sum"
) -> list[tf.Tensor]:
    """Scale a rank's gradients together so that their result over the ranks has about this norm.

    Gradients of independent ranks add up as their squares do. So the limit of one rank is
    norm / sqrt(ranks) for "sum", and norm * sqrt(ranks) for "average", which divides by the number
    of ranks afterwards. If the joint norm is NaN or infinite, all pass unchanged.

    >>> (clipped,) = clip_before_accumulation([tf.constant([3.0, 4.0])], norm=1.0, ranks=4)
    >>> print(clipped.numpy().round(3))
    [0.3 0.4]

    Args:
        gradients: float, any shapes.
        norm: the largest norm of the sum (or average) over the ranks, > 0.
        ranks: number of ranks, >= 1.
        operation: "sum" or "average" over the ranks.

    Returns:
        The gradients, scaled by one factor in (0, 1]; shapes and dtypes as they came.

    **Ranks:** local. **Cost:** two passes; no gradient is returned before the last one is there.
    **Raises:** PlanError for a norm or a number of ranks out of range.
    **Source:** Lin et al., "Deep Gradient Compression" (2018), section 3.3; there, what is summed
    are gradients divided by the number of ranks.
    """
    if norm <= 0 or ranks < 1:
        raise PlanError(
            f"Clipping needs norm > 0 and ranks >= 1. Received norm={norm}, ranks={ranks}."
        )
    limit = norm * ranks ** (0.5 if operation == "average" else -0.5)
    length = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in gradients])
    scale = tf.where(tf.math.is_finite(length) & (length > limit), limit / length, 1.0)

    def scaled(gradient: tf.Tensor) -> tf.Tensor:
        # Float16 may not be able to hold the scale.
        wide = tf.float32 if gradient.dtype.size < 4 else gradient.dtype
        return tf.cast(tf.cast(gradient, wide) * tf.cast(scale, wide), gradient.dtype)

    return [scaled(gradient) for gradient in gradients]


def clip_buckets(gradients: Mapping[str, tf.Tensor], plan: Plan) -> dict[str, tf.Tensor]:
    """Clip, together, what all buckets with the same `clip_norm` hold.

    Args:
        gradients: name in the plan -> tensor, of all variables and pieces of the plan.
    """
    clipped = dict(gradients)
    norms = {bucket.clip_norm for bucket in plan.buckets if bucket.clip_norm is not None}
    for norm in norms:
        names = [
            name for bucket in plan.buckets if bucket.clip_norm == norm for name in bucket.variables
        ]
        parts = clip_before_accumulation(
            [gradients[name] for name in names], norm, plan.topology.size, plan.operation
        )
        clipped |= zip(names, parts, strict=True)
    return clipped
