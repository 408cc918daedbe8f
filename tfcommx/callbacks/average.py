"""Average metrics and the statistics of batch norm over all ranks, or measure these again."""

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
    """Replaces the numbers in an epoch's logs by those over the samples of all ranks.

        steps ... | evaluation (resets the metrics) ... | epoch's end
                  ^ state of training                   ^ state of the evaluation; all are added

    A rank that does not evaluate has the first state alone. The metrics stay as they are.
    """

    def __init__(self) -> None:
        # Prefix of the names in the logs -> state, in this epoch
        self._states: dict[str, MetricState] = {}
        # Names in the logs of which the user has been warned
        self._warned: set[str] = set()
        # The numbers of the last epoch
        self.last: dict[str, Any] = {}

    def begin_run(self, model: keras.Model) -> None:
        """Have the next update of each metric looked at, which Keras is about to trace."""
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
        """Replace the numbers in the logs, and add those that other ranks alone have.

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
        """Replace the numbers in the logs of the run's end: Keras passes this rank's own. Local."""
        if logs is not None:
            logs.update(self.last)


def _state_of(model: keras.Model) -> MetricState:
    return MetricState.of(model.metrics, model.get_metrics_result)


class AverageMetrics(keras.callbacks.Callback):
    """Replace each epoch's metrics by those over the samples of all ranks.

    Losses and metrics become what one process would have found on all the samples, also if ranks
    have unequal shards: what each metric sums up is added over the ranks before its result is
    computed. See `metrics_over_ranks` for metrics that keep no sums, whose mean over the ranks is
    taken, as that of all other numbers in the logs; a warning names those that differ. All ranks
    have the same logs afterwards, also those that do not validate. What is no number stays.

    Put it before callbacks that read metrics; not needed behind BroadcastState, which does the
    same. With ElasticAveraging it does nothing: each rank's metrics are its own.

    **Ranks:** all. **Cost:** an allreduce of the metrics' sums and two small exchanges on the host,
    an epoch; nothing in a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._metrics = EpochMetrics()

    def on_train_begin(self, logs: Any = None) -> None:
        """Prepare."""
        self._metrics.begin_run(self.model)

    def on_test_begin(self, logs: Any = None) -> None:
        """Copy the state of training, which Keras is about to reset."""
        self._metrics.begin_evaluation(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        """Copy the state of the evaluation."""
        self._metrics.end_evaluation(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace; with ranks that train alone, do nothing."""
        if not trains_alone(self.model):
            self._metrics.end_epoch(self.model, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Replace those of the last epoch."""
        self._metrics.end_run(logs)


class AverageBatchNorm(keras.callbacks.Callback):
    """Average over the ranks what layers keep besides what they train, such as batch norm's means.

    Done after the last step of an epoch, so that the validated model is the same on all ranks,
    whichever ranks validate. If Keras does not know the number of steps (`steps_per_epoch`), it is
    done at the epoch's end: each rank validates with its own. Trained weights of frozen layers
    stay. With ElasticAveraging it does nothing: BroadcastState averages at the end of `fit`.

    **Ranks:** all. **Cost:** one allreduce an epoch of all those weights, in float64: equal ones
    stay equal to the bit. Keras waits for every step, as it does with most callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        # In this epoch
        self.averaged = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forget the epoch before."""
        self.averaged = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Average after the last step, if Keras knows which one that is."""
        # Not on_test_begin: a rank that does not validate would not come.
        if (steps := (self.params or {}).get("steps")) and batch + 1 >= steps:
            self._average()
            self.averaged = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average, if that was not done after the last step."""
        if not self.averaged:
            self._average()

    def _average(self) -> None:
        here = process.current()
        statistics = statistics_of(self.model)
        if not statistics or here.topology.size == 1 or trains_alone(self.model):
            return
        flat = tf.concat([tf.reshape(tf.cast(one, tf.float64), [-1]) for one in statistics], axis=0)
        mean = here.allreduce(flat, "world", "tfcommx/statistics") / here.topology.size
        sizes = [int(np.prod(one.shape)) for one in statistics]
        for one, part in zip(statistics, tf.split(mean, sizes), strict=True):
            one.assign(tf.cast(tf.reshape(part, one.shape), one.dtype))
        finalize_layers(self.model)


class RecalibrateBatchNorm(keras.callbacks.Callback):
    """Measure batch norm's means and variances again at the end of `fit`, from some batches.

    For weights that no step was taken with, such as the centre of elastic averaging: put it behind
    BroadcastState. Each statistic becomes the plain average of those of the batches.

    >>> import numpy as np
    >>> import tfcommx as cx
    >>> callback = cx.callbacks.RecalibrateBatchNorm([np.zeros((8, 3))], batches=1)

    Args:
        data: yields batches of inputs, or tuples that begin with them; iterated again each time.
        batches: how many of them, >= 1.

    **Ranks:** each by itself; equal data gives equal statistics. **Cost:** that many forward
    passes, not traced.
    **Raises:** ConfigurationError for `batches` out of range.
    """

    def __init__(self, data: Iterable[Any], batches: int = 100) -> None:
        super().__init__()
        self.data, self.batches = data, check_whole("batches", batches, least=1)

    def on_train_end(self, logs: Any = None) -> None:
        """Measure."""
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
