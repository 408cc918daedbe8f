"""Selector: choose the entries of a bucket that are sent; keep the rest as residual."""

from __future__ import annotations

import tensorflow as tf

from tfcommx import selection
from tfcommx.comm.base import Comm
from tfcommx.kernels.keep import keep
from tfcommx.runtime.residuals import BucketState
from tfcommx.terms import Plan, Sparse
from tfcommx.wire import codec


class Selector:
    """The selection of one bucket on this rank: its rule, residual and velocity, and its seeds."""

    def __init__(self, plan: Plan, index: int, state: BucketState, comm: Comm) -> None:
        """Resolve what is needed for the plan's bucket number `index`, which has a `k`."""
        self.bucket, self.state = plan.buckets[index], state
        self._rule = selection.rule(self.bucket.selection)
        stream = (self.bucket.seed * len(plan.buckets) + index) * plan.topology.size + comm.rank
        self._stream = stream % 2**63

    def seed(self, step: tf.Tensor) -> tf.Tensor:
        """Return the int64 seed of a step: each step, bucket and rank draws its own numbers."""
        with tf.device("/cpu:0"):
            return step * 2**20 + self._stream

    def select(self, part: tf.Tensor, seed: tf.Tensor) -> Sparse:
        """Choose k entries of gradient + residual, rounded to what the wire format can write.

        `part` is this rank's shard of the flat vector. What is not chosen, and what rounding loses,
        stays in the residual.
        """
        bucket, state = self.bucket, self.state
        chosen = self._rule.select_with_residual(
            part, state.residual, bucket.k, seed, state.velocity, bucket.momentum
        )
        sparse, rounding_error = codec.rounded(chosen, bucket.wire)
        if rounding_error is not None:
            keep(state.residual, chosen, rounding_error)
        return sparse
