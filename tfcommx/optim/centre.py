"""Elastic averaging's centre for Keras models: initialize it, save it, load it at the end.

With every other strategy these functions do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np

from tfcommx.keras_internals import finalize_layers, statistics_of
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.wrapped import exchanger_in, wrapped_optimizers
from tfcommx.strategies import ElasticRun


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
    **Raises:** RuntimeError if a rank that holds the centre has ended.
    """
    for optimizer in optimizers or wrapped_optimizers(model):
        for run in _elastic(exchanger_in(optimizer)):
            _set_statistics(model, run.end(_flat_statistics(model)))
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
                own.append((variable, keras.ops.convert_to_numpy(variable)))
                variable.assign(value)
    finalize_layers(model)
    try:
        yield
    finally:
        for variable, value in own:
            variable.assign(value)
        finalize_layers(model)


def _elastic(exchanger: Exchanger) -> list[ElasticRun]:
    return [run for run in exchanger.runs.values() if isinstance(run, ElasticRun)]


def _flat_statistics(model: keras.Model) -> np.ndarray:
    parts = [np.ravel(keras.ops.convert_to_numpy(variable)) for variable in statistics_of(model)]
    return np.concatenate([np.zeros(0), *(part.astype(np.float64) for part in parts)])


def _set_statistics(model: keras.Model, flat: np.ndarray) -> None:
    statistics = statistics_of(model)
    ends = np.cumsum([int(np.prod(variable.shape)) for variable in statistics])[:-1]
    # Without statistics `np.split` returns one empty part
    for variable, part in zip(statistics, np.split(flat, ends), strict=False):
        variable.assign(np.reshape(part, variable.shape))
