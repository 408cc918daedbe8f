"""Work between two steps: consolidate weights, begin a step with its pull."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfcommx.keras_internals import moving_averages, steps_of
from tfcommx.optim.wrapped import exchanger_in
from tfcommx.strategies import ShardedRun


def consolidate(optimizer: keras.optimizers.Optimizer) -> None:
    """Make a model ready to be evaluated or saved, under any strategy.

    Weights become whole and equal on all ranks; the state of shards is gathered on rank 0. `fit`
    does it with the callback BroadcastState at the end of each epoch, and the weights before each
    evaluation.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> optimizer = cx.DistributedOptimizer(keras.optimizers.Adam(0.1), strategy="sharded")
    >>> cx.consolidate(optimizer)

    **Ranks:** all, between the same two steps, outside of traced code. **Cost:** nothing where
    weights are whole and equal after each step; otherwise as the strategy says, and the state of
    shards is sent once.
    **Raises:** RuntimeError if the optimizer is not wrapped.
    """
    consolidate_weights(optimizer)
    exchanger = exchanger_in(optimizer)
    if exchanger.sharding is not None:
        exchanger.sharding.gather_state(steps_of(optimizer))


def consolidate_weights(optimizer: keras.optimizers.Optimizer) -> None:
    """Make weights, and their moving averages, whole and equal on all ranks; no other state.

    **Ranks:** all, between the same two steps, outside of traced code. **Cost:** as `consolidate`.
    **Raises:** RuntimeError if the optimizer is not wrapped.
    """
    exchanger_in(optimizer).consolidate(moving_averages(optimizer))


@tf.autograph.experimental.do_not_convert
def begin_step(optimizer: keras.optimizers.Optimizer, inputs: Any) -> None:
    """Begin a custom training step with the pull, which the forward pass then overlaps.

    Call it first in the function of the step. Without it, or with a strategy that pulls nothing,
    steps end with whole weights; with it the weights are one update old between steps, until
    `consolidate`. `fit` does both with the callback BroadcastState.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> optimizer = cx.DistributedOptimizer(keras.optimizers.Adam(0.1), strategy="sharded")
    >>> cx.begin_step(optimizer, inputs=[])

    Args:
        optimizer: wrapped.
        inputs: of the step: tensors, or a structure of them.

    **Ranks:** all, in each step. **Cost:** the all-gathers of the strategy.
    **Raises:** RuntimeError if the optimizer is not wrapped.
    """
    exchanger = exchanger_in(optimizer)
    if can_pull_first(optimizer):
        tensors = [tensor for tensor in tf.nest.flatten(inputs) if tf.is_tensor(tensor)]
        assert exchanger.sharding is not None, "its steps begin with a pull"
        run = exchanger.run_for(exchanger.sharding.variables)
        assert isinstance(run, ShardedRun), "only Sharded makes shards"
        run.begin(tensors[:1])


def can_pull_first(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if steps of a wrapped optimizer can begin with a pull; False before build."""
    exchanger = exchanger_in(optimizer)
    sharding = exchanger.sharding
    return sharding is not None and sharding.can_pull_first and exchanger.ranks > 1
