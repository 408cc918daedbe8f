"""Work between two steps: consolidate weights, begin a step with its pull, take the centre.

The centre is that of elastic averaging; its functions do nothing with every other strategy.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.keras_internals.models import finalize_layers, statistics_of
from tfcommx.keras_internals.optimizers import entries_of, moving_averages, steps_of
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.wrapped import exchanger_in, wrapped_optimizers
from tfcommx.strategies.easgd.strategy import ElasticRun
from tfcommx.strategies.sharded.strategy import ShardedRun


def consolidate(optimizer: keras.optimizers.Optimizer | keras.Model) -> None:
    """Make a model ready to be evaluated or saved, under any strategy.

    Weights become whole and equal on all ranks; the state of shards is gathered on rank 0. In
    `fit`, BroadcastState does so at the end of each epoch, and for the weights before each
    evaluation.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> optimizer = cx.DistributedOptimizer(keras.optimizers.Adam(0.1), strategy="sharded")
    >>> cx.consolidate(optimizer)

    Args:
        optimizer: wrapped; or a model, for all of its wrapped optimizers.

    **Ranks:** all, between the same two steps, outside of traced code. **Cost:** nothing where
    weights are whole and equal after each step; otherwise as the strategy says, and the state of
    shards is sent once.
    **Raises:** ConfigurationError if the optimizer is not wrapped.
    """
    if isinstance(optimizer, keras.Model):
        for part in wrapped_optimizers(optimizer):
            consolidate(part)
        return
    consolidate_weights(optimizer)
    exchanger = exchanger_in(optimizer)
    if exchanger.sharding is not None:
        exchanger.sharding.gather_state(steps_of(optimizer))


def consolidate_weights(optimizer: keras.optimizers.Optimizer) -> None:
    """Make weights, and their moving averages, whole and equal on all ranks; no other state.

    **Ranks:** all, between the same two steps, outside of traced code. **Cost:** as `consolidate`.
    **Raises:** ConfigurationError if the optimizer is not wrapped.
    """
    exchanger_in(optimizer).consolidate(moving_averages(optimizer))


@tf.autograph.experimental.do_not_convert
def begin_step(optimizer: keras.optimizers.Optimizer, inputs: Any) -> None:
    """Begin a custom training step with the pull, which the forward pass then overlaps.

    Call it first in the function of the step. Without it, or with a strategy that pulls nothing,
    steps end with whole weights; with it the weights are one update old between steps, until
    `consolidate`. In `fit`, BroadcastState does both.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> optimizer = cx.DistributedOptimizer(keras.optimizers.Adam(0.1), strategy="sharded")
    >>> cx.begin_step(optimizer, inputs=[])

    Args:
        optimizer: wrapped.
        inputs: of the step: tensors, or a structure of them.

    **Ranks:** all, in each step. **Cost:** the all-gathers of the strategy.
    **Raises:** ConfigurationError if the optimizer is not wrapped.
    """
    exchanger = exchanger_in(optimizer)
    if can_pull_first(optimizer):
        tensors = [tensor for tensor in tf.nest.flatten(inputs) if tf.is_tensor(tensor)]
        assert exchanger.sharding is not None, "its steps begin with a pull"
        run = exchanger.run_for(exchanger.sharding.variables)
        assert isinstance(run, ShardedRun), "only Sharded makes shards"
        # One input is enough to keep the pull out of the last call of an iterator, which has no
        # data
        run.begin(tensors[:1])


def can_pull_first(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if steps of a wrapped optimizer can begin with a pull; False before build."""
    exchanger = exchanger_in(optimizer)
    sharding = exchanger.sharding
    return sharding is not None and sharding.can_pull_first and exchanger.ranks > 1


def take_centre(model: keras.Model, *optimizers: keras.optimizers.Optimizer) -> None:
    """Wait for all ranks to end their training; give the model the centre.

    For custom loops with ElasticAveraging, after the last step; BroadcastState does it at the end
    of `fit`. The layers' statistics, which are not trained, become the averages over the ranks if
    the strategy is set so.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    >>> optimizer = cx.DistributedOptimizer(
    ...     keras.optimizers.SGD(0.1), strategy="elastic_averaging"
    ... )
    >>> optimizer.build(model.trainable_variables)  # and steps of training
    >>> cx.take_centre(model, optimizer)

    Args:
        model: trained.
        optimizers: wrapped; none: those of the model.

    **Ranks:** all that still train, each after its own last step.
    **Raises:** RankLostError if a rank that holds the centre has ended.
    """
    for optimizer in optimizers or wrapped_optimizers(model):
        for run in _elastic(exchanger_in(optimizer)):
            statistics = statistics_of(model)
            arrays = [entries_of(variable) for variable in statistics]
            parts = [np.ravel(array).astype(np.float64) for array in arrays]
            # An empty part first, because a model may have no statistics
            averages = run.end(np.concatenate([np.zeros(0), *parts]))
            ends = np.cumsum([part.size for part in parts])
            # Not strict, because `np.split` also returns the empty part after the last end
            for variable, part in zip(statistics, np.split(averages, ends), strict=False):
                variable.assign(np.reshape(part, variable.shape))
            finalize_layers(model)


def begin_centre(model: keras.Model) -> None:
    """Initialize the centre with rank 0's weights. **Ranks:** all, with equal weights."""
    for optimizer in wrapped_optimizers(model):
        for run in _elastic(exchanger_in(optimizer)):
            run.begin()


@contextlib.contextmanager
def with_centre(model: keras.Model) -> Iterator[None]:
    """Load the centre into the model within the context, if training; then restore its weights.

    **Ranks:** any, outside of traced code. **Cost:** one message of the weights from the servers.
    """
    own: list[tuple[keras.Variable, np.ndarray]] = []
    for optimizer in wrapped_optimizers(model):
        exchanger = exchanger_in(optimizer)
        weights = dict(zip(exchanger.names.of(model.weights), model.weights, strict=True))
        for run in _elastic(exchanger):
            for path, value in (run.centre() or {}).items():
                variable = weights[path]
                own.append((variable, entries_of(variable)))
                variable.assign(value)
    finalize_layers(model)
    try:
        yield
    finally:
        # Also after an error, because training continues from this rank's weights
        for variable, value in own:
            variable.assign(value)
        finalize_layers(model)


def _elastic(exchanger: Exchanger) -> list[ElasticRun]:
    return [run for run in exchanger.runs.values() if isinstance(run, ElasticRun)]
