"""Strategies by exchanged gradients: Synchronous, the identity; Root and Rebroadcast.

With `Synchronous` every rank applies the exchanged gradients. The others broadcast rank 0's weights
within a step, bucket by bucket. With `Root` rank 0 alone applies the gradients:

    ranks 0 to 3     gradients -> reduce -> rank 0 updates -> broadcast -> weights on all ranks

Routes of messages reduce to rank 0; on other routes all ranks receive the sums. `Rebroadcast` is
synchronous, and every few steps rank 0's weights replace those of all ranks.

**Source:** Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
Algorithms 2 (Root) and 3 (Rebroadcast). Algorithm 1 overlaps messages with computation, layer by
layer. Its reduces are the buckets of any strategy, which travel during the backward pass. Its
broadcasts during the forward pass are `Sharded(pull="layers")`, by all-gathers; `Root` ends a step
with its broadcasts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from tfcommx.core import Plan, PlanError, check_whole
from tfcommx.kernels.traced import untraced
from tfcommx.runtime.bucket_runner import cut, join
from tfcommx.runtime.executor import PlanExecutor, only_plan
from tfcommx.runtime.gradient_state import Executor
from tfcommx.strategies.strategy import Strategy, StrategyRun, Update


@dataclass(frozen=True)
class Synchronous(Strategy):
    """Exchange gradients at every step and apply them on every rank, as plain Horovod does.

    The gradients have the same bits on all ranks, so the weights do not drift apart.
    """


def broadcast_weights(weights: Mapping[str, tf.Variable], executor: PlanExecutor) -> None:
    """Set the weights to those of rank 0.

    **Ranks:** all. **Cost:** one broadcast a bucket, by messages if its route sends messages.
    """
    tensors = {path: tf.convert_to_tensor(variable) for path, variable in weights.items()}
    pieces = cut(tensors, executor.plan)
    result: dict[str, tf.Tensor] = {}
    with executor.scope():
        for runner in executor.runners:
            names = runner.bucket.variables
            result |= zip(names, runner.broadcast([pieces[name] for name in names]), strict=True)
    for path, value in join(result, tensors).items():
        weights[path].assign(value)


@dataclass(frozen=True)
class Root(Strategy):
    """Let rank 0 alone apply the gradients and broadcast the weights after each step.

    The other ranks' optimizer state keeps its initial values, and a checkpoint of rank 0 has the
    whole state. It saves the update on all ranks but one. On the routes `pipeline` and `tree` it
    costs as many bytes as an allreduce, on the others more.
    """

    reduces_to_root: ClassVar[bool] = True

    def check(self, plan: Plan) -> None:
        """Refuse momentum in the scheme. **Raises:** PlanError."""
        # Without the base class's check, which refuses plans that reduce to rank 0
        if any(bucket.momentum for bucket in plan.buckets):
            raise PlanError(
                'With strategy="root" only rank 0 has the sums that momentum is made of. Received '
                "a scheme with momentum. Give it to the Keras optimizer."
            )

    def start(self, executor: Executor) -> StrategyRun:
        return RootRun(only_plan(executor))


class RootRun(StrategyRun):
    executor: PlanExecutor

    def __init__(self, executor: PlanExecutor) -> None:
        super().__init__(executor)
        self._seen: tf.Variable | None = None

    def update(self, step: Update) -> None:
        """Apply the update on rank 0 and broadcast the weights; other ranks only take part."""
        done: list[tf.Operation | None] = []
        if self.executor.comm.rank == 0:
            step.apply()
        else:
            done = [self._force(step.gradients)]
        with tf.control_dependencies(done):
            broadcast_weights(step.weights, self.executor)

    def _force(self, results: Sequence[tf.Tensor]) -> tf.Operation | None:
        # An assignment of their entries, because TensorFlow prunes unused operations: Horovod's ops
        # are not marked as stateful, and a control dependency on their results does not keep them
        entries = [tf.reshape(result, [-1])[0] for result in results if result.shape.num_elements()]
        seen = tf.stack([tf.cast(entry, tf.float32) for entry in entries])
        if self._seen is None:
            with untraced(), tf.device("/cpu:0"):
                self._seen = tf.Variable(tf.zeros(seen.shape), trainable=False, name="tfcommx/seen")
        return self._seen.assign(seen, read_value=False)


@dataclass(frozen=True)
class Rebroadcast(Strategy):
    """Apply the exchanged gradients on every rank; every few steps broadcast rank 0's weights.

    The gradients have the same bits on all ranks anyway: it helps only if the ranks' processors
    compute the update differently.
    """

    # Steps, an integer >= 1, after which the weights are broadcast; 5 as in the paper
    every: int = 5

    keeps_weights_equal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_whole("every", self.every, least=1))

    def start(self, executor: Executor) -> StrategyRun:
        return RebroadcastRun(only_plan(executor), self.every)


class RebroadcastRun(StrategyRun):
    executor: PlanExecutor

    def __init__(self, executor: PlanExecutor, every: int) -> None:
        super().__init__(executor)
        self._every = every

    def update(self, step: Update) -> None:
        """Apply the update, as on every rank; broadcast the weights if a broadcast is due."""
        step.apply()
        if self._every == 1:
            broadcast_weights(step.weights, self.executor)
        else:
            # `exchange` has counted this step already
            due = self.executor.steps % self._every == 0
            tf.cond(due, lambda: broadcast_weights(step.weights, self.executor), lambda: None)
