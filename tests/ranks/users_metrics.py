"""Metrics as users write them: custom sums, and states that cannot be summed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Calibration(keras.metrics.Metric):
    """A user's own sums, with an integer count and a constant that a reset leaves."""

    def __init__(self, name: str = "calibration") -> None:
        super().__init__(name=name)
        self.gap = self.add_weight(name="gap", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int32")
        self.factor = self.add_weight(name="factor", initializer="ones")
        self.factor.assign(3.0)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        picked = tf.gather(y_pred, tf.cast(tf.reshape(y_true, [-1]), tf.int32), axis=1)
        self.gap.assign_add(tf.reduce_sum(tf.linalg.diag_part(picked) ** 2))
        self.count.assign_add(tf.shape(y_pred)[0])

    def result(self) -> Any:
        return self.factor * self.gap / tf.maximum(tf.cast(self.count, tf.float32), 1.0)

    def reset_state(self) -> None:
        self.gap.assign(0.0)
        self.count.assign(0)


class Largest(keras.metrics.Metric):
    """A maximum, which a user may write and which is no sum."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))

    def result(self) -> Any:
        return self.largest


class Smoothed(Largest):
    """A moving average."""

    def __init__(self) -> None:
        super().__init__("smoothed")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(0.9 * self.largest + 0.1 * tf.reduce_mean(y_pred[:, 0]))


class Smallest(Largest):
    """A minimum, whose reset is no zero."""

    def __init__(self) -> None:
        super().__init__("smallest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(tf.minimum(self.largest, tf.reduce_min(y_pred)))

    def reset_state(self) -> None:
        self.largest.assign(np.inf)
