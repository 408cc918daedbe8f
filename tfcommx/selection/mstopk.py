"""Rule `mstopk`: all entries above a band that holds the k-th largest magnitude, and from the band
a random run of the rest.

The band is 1/4096 wide, relative to its magnitude: what is chosen differs from the exact top k only
in there.
**Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters, 2021, Algorithm 1; we find the thresholds by counting in bins, in one pass, in place of a
binary search.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import native
from tfcommx.terms import Sparse


def select(gradient: tf.Tensor, k: int, seed: int = 0) -> Sparse:
    """Choose k entries of the gradient by Algorithm 1's contract; see `native.select`."""
    return native.select(gradient, k, seed, "mstopk")


def select_with_residual(
    gradient: tf.Tensor,
    residual: tf.Variable,
    k: int,
    seed: int = 0,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Choose k entries of gradient + residual by Algorithm 1's contract; see
    `native.select_with_residual`.
    """
    return native.select_with_residual(gradient, residual, k, seed, "mstopk", velocity, momentum)
