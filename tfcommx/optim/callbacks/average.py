"""Callbacks that average over the ranks: metrics, batch-norm statistics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.comm import process


class AverageMetrics(keras.callbacks.Callback):
    """Replace each epoch's metrics by their average over the ranks; put it before callbacks that
    read them. **Ranks:** all.

    Metrics of several numbers, such as an F1Score of each class, are averaged number by number;
    what is no number stays.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs:
            arrays = {name: np.asarray(value) for name, value in logs.items()}
            mine = {name: array for name, array in arrays.items() if array.dtype.kind in "biuf"}
            parts = process.current().gather_objects(mine)
            # a rank that alone validates has metrics that the others do not have
            for name, array in mine.items():
                mean = np.mean([part[name] for part in parts if name in part], axis=0)
                logs[name] = mean if array.ndim else float(mean)


class AverageBatchNorm(keras.callbacks.Callback):
    """Average what layers keep beside what they train, such as the moving statistics of batch norm,
    over the ranks.

    Done after the last step of an epoch, so that what is validated is the same model on all ranks,
    whichever ranks validate. Where Keras does not know the number of steps (`steps_per_epoch`),
    done at the epoch's end: each rank validates with its own. Trained weights of frozen layers
    stay.
    **Ranks:** all. **Cost:** one allreduce an epoch of all those weights, in float64: equal ones
    stay equal to the bit. Keras waits for every step, as it does with most callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.averaged = False  # in this epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.averaged = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # not on_test_begin: a rank that does not validate would not come
        if (steps := (self.params or {}).get("steps")) and batch + 1 >= steps:
            self._average()
            self.averaged = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.averaged:
            self._average()

    def _average(self) -> None:
        here = process.current()
        weights = [
            weight
            for layer in self.model._flatten_layers()
            for weight in layer._non_trainable_variables
            if keras.backend.is_float_dtype(keras.backend.standardize_dtype(weight.dtype))
        ]
        if not weights or here.topology.size == 1:
            return
        flat = tf.concat(
            [tf.reshape(tf.cast(weight, tf.float64), [-1]) for weight in weights], axis=0
        )
        mean = here.allreduce(flat, "world", "tfcommx/statistics") / here.topology.size
        for weight, part in zip(
            weights, tf.split(mean, [int(np.prod(weight.shape)) for weight in weights]), strict=True
        ):
            weight.assign(tf.cast(tf.reshape(part, weight.shape), weight.dtype))
