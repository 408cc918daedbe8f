"""Rule `exact`: the k largest magnitudes; of equal ones the lowest indices."""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import native
from tfcommx.terms import Sparse


def select(gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
    """Choose the k largest magnitudes of the gradient; see `native.select`."""
    return native.select(gradient, k, seed, "exact")


def select_with_residual(
    gradient: tf.Tensor,
    residual: tf.Variable,
    k: int,
    seed: int = 0,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Choose the k largest magnitudes of gradient + residual; see `native.select_with_residual`."""
    return native.select_with_residual(gradient, residual, k, seed, "exact", velocity, momentum)
