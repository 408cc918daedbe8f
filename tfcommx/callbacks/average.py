"""Average metrics and the statistics of batch norm over all ranks, or measure the statistics."""

import itertools
from collections.abc import Iterable
from typing import Any

import keras

from tfcommx.collectives import process
from tfcommx.core import check_whole, log
from tfcommx.keras_internals.metrics import metrics_in, watch_update
from tfcommx.keras_internals.models import (
    call_alike,
    finalize_layers,
    layers_of,
    statistics_averaged,
    statistics_of,
)
from tfcommx.optim.broadcast import average_variables
from tfcommx.optim.metrics_over_ranks import MetricState, metric_results_over_ranks, numbers_in
from tfcommx.optim.wrapped import trains_alone


def _state_of(model: keras.Model) -> MetricState:
    return MetricState.of(model.metrics, model.get_metrics_result)


class AverageMetrics(keras.callbacks.Callback):
    """Replace each epoch's metrics by their values over the samples of all ranks.

    They are those of one process on all the samples (see `metrics_over_ranks`); all other numbers
    in the logs become their mean over the ranks, and a warning names those that differ. All ranks
    have the same logs afterwards, also ranks that do not validate. The metrics do not change.

    Put it before callbacks that read metrics; not needed behind BroadcastState, which does the
    same. Without effect with ElasticAveraging: each rank keeps its metrics.

        steps ... | evaluation (resets the metrics) ... | epoch's end
                  ^ state of training                   ^ state of the evaluation; all are added

    **Ranks:** all. **Cost:** an allreduce of the metrics' sums and two small exchanges on the host
    per epoch; none per step.
    """

    def __init__(self) -> None:
        super().__init__()
        # Prefix of the names in the logs -> state, in this epoch. A rank that does not evaluate has
        # only that of training, ""
        self._states: dict[str, MetricState] = {}
        # Names in the logs for which a warning was given
        self._warned: set[str] = set()
        # The numbers of the last epoch
        self._last: dict[str, Any] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Observe the next update of each metric, which Keras is about to trace."""
        self._states, self._last = {}, {}
        for metric in metrics_in(self.model.metrics):
            watch_update(metric)

    def on_test_begin(self, logs: Any = None) -> None:
        """Copy the state of training, which Keras is about to reset."""
        # Only before the epoch's first evaluation: afterwards the metrics are those of an
        # evaluation
        self._states.setdefault("", _state_of(self.model))

    def on_test_end(self, logs: Any = None) -> None:
        """Copy the state of the evaluation. Local, because not every rank evaluates."""
        self._states["val_"] = _state_of(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics, unless ranks train alone; add those that only other ranks have."""
        if trains_alone(self.model):
            return
        if self.model is not None:  # A callback outside of `fit`
            self._states.setdefault("", _state_of(self.model))
        logs = {} if logs is None else logs
        numbers = metric_results_over_ranks(self._states, numbers_in(logs), self._warned)
        self._states = {}
        self._last = {name: part if part.ndim else part.item() for name, part in numbers.items()}
        logs.update(self._last)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics of the last epoch, because Keras passes this rank's."""
        if logs is not None:
            logs.update(self._last)


class AverageBatchNorm(keras.callbacks.Callback):
    """Average over the ranks the statistics of layers, such as batch norm's means and variances.

    Done after the last step of an epoch, so that the validated model is the same on all ranks. If
    Keras does not know the number of steps (`steps_per_epoch`), it is done at the epoch's end, and
    each rank validates with its own statistics. In between, each rank trains with its own: let a
    layer whose state must be equal in each step, such as a code book, call hvd.allreduce. Without
    effect with ElasticAveraging, with which BroadcastState averages at the end of `fit`.

    **Ranks:** all. **Cost:** one allreduce per epoch of all statistics, in float64. Keras waits for
    every step, as with most callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        # True once the statistics of this epoch are averaged
        self.averaged = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
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
        average_variables(statistics, comm, "tfcommx/statistics")
        finalize_layers(self.model)


class RecalibrateBatchNorm(keras.callbacks.Callback):
    """Measure batch norm's means and variances again at the end of `fit`, from some batches.

    For weights that no step has used, such as the centre of elastic averaging: put it behind
    BroadcastState. Each statistic becomes the plain average of its values in the batches, and of
    all calls of a layer that the model calls several times; no other variable changes.

    >>> import numpy as np
    >>> import tfcommx as cx
    >>> callback = cx.callbacks.RecalibrateBatchNorm([np.zeros((8, 3))], batches=1)

    Args:
        data: yields batches of inputs, or tuples that begin with them; iterated in each `fit`.
        batches: number of batches, >= 1.

    **Ranks:** local; all with SyncBatchNormalization. Equal data and weights yield equal
    statistics. **Cost:** `batches` forward passes, not traced.
    **Raises:** ConfigurationError for `batches` out of range.
    """

    def __init__(self, data: Iterable[Any], batches: int = 100) -> None:
        super().__init__()
        self.data, self.batches = data, check_whole("batches", batches, least=1)

    def on_train_end(self, logs: Any = None) -> None:
        layers = [
            layer
            for layer in layers_of(self.model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        if not layers:
            return
        statistics = [value for layer in layers for value in layer.non_trainable_variables]
        count = 0
        with statistics_averaged(layers):
            for count, batch in enumerate(itertools.islice(self.data, self.batches), 1):
                inputs = batch[0] if isinstance(batch, tuple | list) else batch
                # Because each rank's dropout has its own seeds, and layers such as
                # SpectralNormalization change their weights in a call
                measured = call_alike(
                    self.model,
                    inputs,
                    lambda _: [value.value for value in statistics],
                    seed=count - 1,
                    training=True,
                )
                for variable, value in zip(statistics, measured, strict=True):
                    variable.assign(value)
        if not count:
            log.warning(
                "RecalibrateBatchNorm needs data. Its `data` has yielded no batch, so the "
                "statistics are those of the training. Pass data that each `fit` can iterate anew, "
                "such as a list or a tf.data.Dataset."
            )
