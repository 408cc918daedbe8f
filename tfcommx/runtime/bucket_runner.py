"""BucketRunner: the exchange of one bucket in a step.

The only file here that asks the table of routes for anything except shards and prices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import tensorflow as tf

from tfcommx import routes
from tfcommx.comm.base import Comm
from tfcommx.runtime.compressor import Compressor
from tfcommx.runtime.flat import flatten, unflatten
from tfcommx.runtime.residuals import BucketState
from tfcommx.runtime.selector import Selector
from tfcommx.terms import Plan
from tfcommx.wire import codec


class BucketRunner:
    """Carries out one bucket of a plan on this rank: its route, selection and state, resolved."""

    def __init__(self, plan: Plan, index: int, state: BucketState, comm: Comm) -> None:
        """Decide how the plan's bucket number `index` travels.

        `state` is what this rank keeps of it. A dense bucket that has a residual to add, from a
        plan before, travels as a flat vector.
        """
        bucket = plan.buckets[index]
        self.bucket, self.state, self._comm = bucket, state, comm
        self._route = routes.get(bucket.route)
        # Its sum is the engine's allreduce of what comes, and nothing else
        changed = bucket.keeps_residual or bucket.momentum or state.pending is not None
        self.is_plain = self._route.takes_list and not changed
        self._average = plan.operation == "average"
        # The sum over the ranks times this is the result.
        self.factor = 1 / plan.topology.size if self._average else 1.0
        # A power of two may multiply the entries that came instead of the whole vector: the same
        # bits, except for numbers so small or large that float32 cannot hold them
        exact = bucket.k is not None and math.frexp(self.factor)[0] == 0.5
        self.codec = codec.Codec(self.factor if exact else 1.0)
        if bucket.rounds:
            self.codec = codec.RoundingCodec(state.residual, self.factor)
        self._factor_after = 1.0 if exact or bucket.rounds else self.factor
        self.selector = None if bucket.k is None else Selector(plan, index, state, comm)
        self.compressor = Compressor(bucket, state, comm) if bucket.compresses else None

    def exchange(self, parts: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Return the average (or sum) over the ranks of each of the bucket's tensors.

        Args:
            parts: this rank's gradients, in the order of the bucket's variables.
            step: int64, the number of this step, from 1.

        **Ranks:** all. **Cost:** one copy into and one out of the flat vector, and the route.
        """
        if self.is_plain:
            return self._exchange_list(parts)
        total = self._sum(flatten(parts, self.bucket), step)
        if self._factor_after != 1:
            total = total * tf.constant(self._factor_after, total.dtype)
        return unflatten(total, parts, self.bucket)

    def broadcast(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return rank 0's tensors, such as the weights of the bucket's variables, on every rank.

        **Ranks:** all. **Cost:** one broadcast, by the route's own messages if it has such.
        """
        flat = self._route.broadcast(flatten(parts, self.bucket), self.bucket, self._comm)
        return unflatten(flat, parts, self.bucket)

    def _exchange_list(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        cast = [tf.cast(part, self.bucket.dtype) for part in parts]
        totals = self._route.run_list(cast, self.bucket, self._comm, self._average)
        return [tf.cast(total, part.dtype) for total, part in zip(totals, parts, strict=True)]

    def _sum(self, flat: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Return the sum over the ranks of what is sent of the flat vector."""
        if self.compressor is not None:
            return self.compressor.exchange(flat)
        if self.selector is None:
            total = self._route.run(flat, self.bucket, self._comm, self.codec)
            # Earlier residuals are added after momentum, which has been applied to them already.
            return self.state.add_residual(self.state.add_velocity(total))
        select = functools.partial(self.selector.select, seed=self.selector.seed(step))
        return self._route.run(flat, self.bucket, self._comm, self.codec, select)
