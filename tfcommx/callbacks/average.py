"""Average metrics and the statistics of batch norm over all ranks, or measure the statistics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.core import check_whole
from tfcommx.keras_internals import (
    finalize_layers,
    layers_of,
    metrics_in,
    statistics_of,
    watch_update,
)
from tfcommx.optim.metrics_over_ranks import MetricState, numbers_in, over_ranks
from tfcommx.optim.wrapped import trains_alone


class EpochMetrics:
    """Replaces the numbers in an epoch's logs by their values over the samples of all ranks.

        steps ... | evaluation (resets the metrics) ... | epoch's end
                  ^ state of training                   ^ state of the evaluation; all are added

    A rank that does not evaluate has only the first state. The metrics do not change.
    """

    def __init__(self) -> None:
        # Prefix of the names in the logs -> state, in this epoch
        self._states: dict[str, MetricState] = {}
        # Names in the logs for which a warning was given
        self._warned: set[str] = set()
        # The numbers of the last epoch
        self.last: dict[str, Any] = {}

    def begin_run(self, model: keras.Model) -> None:
        """Observe the next update of each metric, which Keras is about to trace."""
        self._states, self.last = {}, {}
        for metric in metrics_in(model.metrics):
            watch_update(metric)

    def begin_evaluation(self, model: keras.Model) -> None:
        """Copy the state of training, which Keras is about to reset. Local."""
        self._states.setdefault("", _state_of(model))

    def end_evaluation(self, model: keras.Model) -> None:
        """Copy the state of the evaluation. Local."""
        self._states["val_"] = _state_of(model)

    def end_epoch(self, model: keras.Model | None, logs: dict[str, Any] | None) -> None:
        """Replace the numbers in the logs, and add those that only other ranks have.

        **Ranks:** all. **Cost:** an allreduce of the metrics' sums, and two small exchanges.
        """
        if model is not None:
            self._states.setdefault("", _state_of(model))
        logs = {} if logs is None else logs
        numbers = over_ranks(self._states, numbers_in(logs), self._warned)
        self._states = {}
        self.last = {name: value if value.ndim else value.item() for name, value in numbers.items()}
        logs.update(self.last)

    def end_run(self, logs: dict[str, Any] | None) -> None:
        """Replace the numbers in the final logs, because Keras passes this rank's. Local."""
        if logs is not None:
            logs.update(self.last)


def _state_of(model: keras.Model) -> MetricState:
    return MetricState.of(model.metrics, model.get_metrics_result)


class AverageMetrics(keras.callbacks.Callback):
    """Replace each epoch's metrics by their values over the samples of all ranks.

    Losses and metrics equal those of one process on all the samples, also if ranks have unequal
    shards, because the sums of each metric are added over the ranks before its result is computed.
    Metrics without sums (see `metrics_over_ranks`) and all other numbers in the logs become their
    mean over the ranks; a warning names those that differ. All ranks have the same logs afterwards,
    also ranks that do not validate. Other values in the logs do not change.

    Put it before callbacks that read metrics; not needed behind BroadcastState, which does the
    same. Without effect with ElasticAveraging: each rank keeps its metrics.

    **Ranks:** all. **Cost:** an allreduce of the metrics' sums and two small exchanges on the host
    per epoch; none per step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._metrics = EpochMetrics()

    def on_train_begin(self, logs: Any = None) -> None:
        """Prepare the metrics of the run."""
        self._metrics.begin_run(self.model)

    def on_test_begin(self, logs: Any = None) -> None:
        """Copy the state of training, which Keras is about to reset."""
        self._metrics.begin_evaluation(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        """Copy the state of the evaluation."""
        self._metrics.end_evaluation(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics, unless ranks train alone."""
        if not trains_alone(self.model):
            self._metrics.end_epoch(self.model, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics of the last epoch."""
        self._metrics.end_run(logs)


class AverageBatchNorm(keras.callbacks.Callback):
    """Average over the ranks the statistics of layers, such as batch norm's means and variances.

    Done after the last step of an epoch, so that the validated model is the same on all ranks, for
    any set of validating ranks. If Keras does not know the number of steps (`steps_per_epoch`), it
    is done at the epoch's end, and each rank validates with its unaveraged statistics. Trained
    weights of frozen layers do not change. Without effect with ElasticAveraging, because
    BroadcastState averages at the end of `fit`.

    **Ranks:** all. **Cost:** one allreduce per epoch of all statistics, in float64, so that equal
    values stay equal to the bit. Keras waits for every step, as with most callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        # True once the statistics of this epoch are averaged
        self.averaged = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the state of the previous epoch."""
        self.averaged = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Average after the last step, if Keras knows the number of steps."""
        # Not on_test_begin, because ranks that do not validate would not take part
        if (steps := (self.params or {}).get("steps")) and batch + 1 >= steps:
            self._average()
            self.averaged = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average, unless done after the last step."""
        if not self.averaged:
            self._average()

    def _average(self) -> None:
        comm = process.current()
        statistics = statistics_of(self.model)
        if not statistics or comm.topology.size == 1 or trains_alone(self.model):
            return
        flat = tf.concat(
            [tf.reshape(tf.cast(statistic, tf.float64), [-1]) for statistic in statistics], axis=0
        )
        mean = comm.allreduce(flat, "world", "tfcommx/statistics") / comm.topology.size
        sizes = [int(np.prod(statistic.shape)) for statistic in statistics]
        for statistic, part in zip(statistics, tf.split(mean, sizes), strict=True):
            statistic.assign(tf.cast(tf.reshape(part, statistic.shape), statistic.dtype))
        finalize_layers(self.model)


class RecalibrateBatchNorm(keras.callbacks.Callback):
    """Measure batch norm's means and variances again at the end of `fit`, from some batches.

    For weights that no step has used, such as the centre of elastic averaging: put it behind
    BroadcastState. Each statistic becomes the plain average of the batches' values.

    >>> import numpy as np
    >>> import tfcommx as cx
    >>> callback = cx.callbacks.RecalibrateBatchNorm([np.zeros((8, 3))], batches=1)

    Args:
        data: yields batches of inputs, or tuples that begin with them; iterated in each `fit`.
        batches: number of batches, >= 1.

    **Ranks:** local; equal data yields equal statistics. **Cost:** `batches` forward passes, not
    traced.
    **Raises:** ConfigurationError for `batches` out of range.
    """

    def __init__(self, data: Iterable[Any], batches: int = 100) -> None:
        super().__init__()
        self.data, self.batches = data, check_whole("batches", batches, least=1)

    def on_train_end(self, logs: Any = None) -> None:
        """Measure the statistics."""
        layers = [
            layer
            for layer in layers_of(self.model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        if not layers:
            return
        usual = [layer.momentum for layer in layers]
        try:
            for count, batch in enumerate(itertools.islice(self.data, self.batches)):
                for layer in layers:
                    layer.momentum = count / (count + 1)
                self.model(batch[0] if isinstance(batch, tuple | list) else batch, training=True)
        finally:
            for layer, momentum in zip(layers, usual, strict=True):
                layer.momentum = momentum
