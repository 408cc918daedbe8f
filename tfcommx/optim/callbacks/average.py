"""AverageMetrics and AverageBatchNorm: averages over the ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.comm import process
from tfcommx.optim.keras_internals import finalize_layers, statistics_of
from tfcommx.optim.wrapped import trains_alone


def average_over_ranks(logs: dict[str, Any]) -> None:
    """Replace the numbers in `logs` by their averages over the ranks. **Ranks:** all."""
    arrays = {name: np.asarray(value) for name, value in logs.items()}
    mine = {name: array for name, array in arrays.items() if array.dtype.kind in "biuf"}
    parts = process.current().gather_objects(mine)
    # If one rank alone validates, it has metrics that the others do not have.
    for name, array in mine.items():
        mean = np.mean([part[name] for part in parts if name in part], axis=0)
        logs[name] = mean if array.ndim else float(mean)


class AverageMetrics(keras.callbacks.Callback):
    """Replace each epoch's metrics by their average over the ranks.

    Put it before callbacks that read them; not needed behind BroadcastState, which does the same.
    With ElasticAveraging it does nothing: each rank's metrics are its own.
    Metrics of several numbers, such as an F1Score of each class, are averaged number by number;
    what is no number stays.

    **Ranks:** all. **Cost:** one small exchange on the host, an epoch.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average; with ranks that train alone, do nothing."""
        if logs and not trains_alone(self.model):
            average_over_ranks(logs)


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
