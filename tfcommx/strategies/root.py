"""Root: rank 0 alone applies the gradients, then broadcasts the weights.

    ranks 0 to 3     gradients -> reduce -> rank 0 updates -> broadcast -> weights on all ranks

**Source:** Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
Algorithm 2. Routes of messages reduce to rank 0; others bring the sums to all ranks, as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfcommx.kernels.untraced import untraced
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.base import Strategy, StrategyRun, Update
from tfcommx.strategies.broadcast_weights import broadcast_weights
from tfcommx.terms import Plan, PlanError


@dataclass(frozen=True)
class Root(Strategy):
    """Let rank 0 alone apply the gradients and broadcast the weights after each step.

    The other ranks' momentum and the like stay as they began, and a checkpoint of rank 0 has the
    whole state. It costs more bytes than an allreduce; it saves the update on all ranks but one.
    """

    reduces_to_root: ClassVar[bool] = True

    def check(self, plan: Plan) -> None:
        """Refuse momentum in the scheme: other ranks lack the sums. **Raises:** PlanError."""
        if any(bucket.momentum for bucket in plan.buckets):
            raise PlanError(
                'With strategy="root" only rank 0 has the sums that momentum is made of. Received '
                "a scheme with momentum. Give it to the Keras optimizer."
            )

    def start(self, executor: PlanExecutor) -> StrategyRun:
        """Get ready for the steps of one plan."""
        return RootRun(executor)


class RootRun(StrategyRun):
    """The strategy at work on one plan."""

    def __init__(self, executor: PlanExecutor) -> None:
        super().__init__(executor)
        self._seen: tf.Variable | None = None

    @tf.autograph.experimental.do_not_convert
    def update(self, step: Update) -> None:
        """Apply the update on rank 0 and broadcast the weights; elsewhere only take part."""
        if self.executor.comm.rank == 0:
            step.apply()
            done = []
        else:
            done = [self._force(step.gradients)]
        with tf.control_dependencies(done):
            broadcast_weights(step.weights, self.executor)

    def _force(self, results: Sequence[tf.Tensor]) -> tf.Operation | None:
        """Return an operation after which all the results have been computed, which nobody uses.

        TensorFlow drops what nobody uses, and Horovod's ops do not say that others wait for them; a
        control dependency on their results does not keep them either. Assigning an entry of each to
        a variable does.
        """
        entries = [tf.reshape(one, [-1])[0] for one in results if one.shape.num_elements()]
        seen = tf.stack([tf.cast(entry, tf.float32) for entry in entries])
        if self._seen is None:
            with untraced(), tf.device("/cpu:0"):
                self._seen = tf.Variable(tf.zeros(seen.shape), trainable=False, name="tfcommx/seen")
        return self._seen.assign(seen, read_value=False)
