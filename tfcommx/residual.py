"""What is done around a selection rule: momentum before it, a clipped gradient, a density that falls in the first epochs.

Error feedback itself is part of every rule (`select_with_residual`), because the kernels fuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcommx.terms import PlanError, Sparse

DGC_WARM_UP = (0.25, 0.063, 0.015, 0.004, 0.001)  # densities of the first epochs, then the last for good

SelectWithResidual = Callable[[tf.Tensor, tf.Variable, int, Any], Sparse]


def select_with_momentum(
    rule: SelectWithResidual, gradient: tf.Tensor, velocity: tf.Variable, residual: tf.Variable, k: int, seed: Any,
    momentum: float = 0.9,
) -> Sparse:
    """Choose from the accumulated velocity rather than the accumulated gradient, so that delayed entries keep their momentum.

        u = momentum u + g;   v = v + u;   the k chosen entries of v travel, and u and v are zeroed there (factor masking)

    The optimizer that applies the result must have no momentum of its own: it would be applied twice.
    Args: rule: a rule's `select_with_residual`; gradient float [n]; velocity u and residual v float32 [n] variables, updated in
    place; momentum in [0, 1). Where u would become NaN or infinite, u and v keep their old values and the entry is sent.
    **Ranks:** local. **Cost:** the rule's, and three passes over u.
    **Source:** Lin et al., Deep Gradient Compression, 2018, section 3.2 and Algorithm 4.
    """
    if not 0 <= momentum < 1:
        raise PlanError(f"`momentum` must be in [0, 1). Received momentum={momentum}.")
    old = tf.convert_to_tensor(velocity)
    moved = momentum * old + tf.cast(gradient, tf.float32)
    chosen = rule(moved, residual, k, seed)
    kept = tf.where(tf.math.is_finite(moved), moved, old)
    masked = tf.tensor_scatter_nd_update(kept, chosen.indices[:, None], tf.where(
        tf.math.is_finite(chosen.values), 0.0, tf.gather(old, chosen.indices)))
    velocity.assign(masked)
    return chosen


def clip_before_accumulation(gradient: tf.Tensor, norm: float, ranks: int) -> tf.Tensor:
    """Scale a local gradient to a norm of at most norm / sqrt(ranks): the sum over ranks is then clipped at about `norm`.

    A non-finite gradient passes unchanged. **Ranks:** local. **Cost:** two passes.
    **Source:** Lin et al., Deep Gradient Compression, 2018, section 3.3.
    """
    if norm <= 0 or ranks < 1:
        raise PlanError(f"Clipping needs norm > 0 and ranks >= 1. Received norm={norm}, ranks={ranks}.")
    limit = norm / ranks**0.5
    length = tf.norm(tf.cast(gradient, tf.float32))
    scale = tf.where(tf.math.is_finite(length) & (length > limit), limit / length, 1.0)
    return gradient * tf.cast(scale, gradient.dtype)


def warm_up_density(epoch: int, densities: Sequence[float] = DGC_WARM_UP) -> float:
    """Return the density of an epoch (0 is the first): one step of the ladder each, then its last step for good.

    **Source:** Lin et al., Deep Gradient Compression, 2018, section 3.3.
    """
    if epoch < 0 or not densities or any(not 0 < density <= 1 for density in densities):
        raise PlanError(f"A warm-up needs epoch >= 0 and densities in (0, 1]. Received epoch={epoch}, densities={densities}.")
    return densities[min(epoch, len(densities) - 1)]
