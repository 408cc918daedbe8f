"""Broadcast rank 0's weights within a training step, bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.flat import cut, join


def broadcast_weights(weights: Mapping[str, tf.Variable], executor: PlanExecutor) -> None:
    """Set the weights to those of rank 0.

    Args:
        weights: variable path -> variable, for exactly the variables of the plan.
        executor: of the plan.

    **Ranks:** all. **Cost:** one broadcast a bucket, by messages if its route is one of messages.
    """
    whole = {path: tf.convert_to_tensor(variable) for path, variable in weights.items()}
    pieces = cut(whole, executor.plan)
    result: dict[str, tf.Tensor] = {}
    with executor.scope():
        for runner in executor.runners:
            names = runner.bucket.variables
            result |= zip(names, runner.broadcast([pieces[name] for name in names]), strict=True)
    for path, value in join(result, whole).items():
        weights[path].assign(value)
