"""Timing: where the seconds of an epoch go."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf


class Timing(keras.callbacks.Callback):
    """Measures where an epoch's seconds go on this rank.

    - `data`: from the start of a step until its batch has arrived, read inside the step by
      `tf.timestamp`.
    - `step`: from then until the step has ended: forward, backward, exchange (with the wait for
      slower ranks) and update. They overlap, so they are one number.
    - `first_step`: the whole first step of a phase, in which TensorFlow traces and compiles the
      step.
    - `evaluation`: measured by Evaluation.
    - `other`: the rest of the epoch: averaging, comparing, reporting.
    """

    def __init__(self) -> None:
        super().__init__()
        # Seconds since 1970 when the batch had arrived
        self.arrived = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self.seconds: dict[str, float] = {}
        self.epoch_start = 0.0

    def watch(self, model: keras.Model) -> None:
        """Make the model's training step note when its batch has arrived."""
        train_step = model.train_step

        def timed(data: Any) -> Any:
            with tf.control_dependencies(tf.nest.flatten(data)):
                noted = self.arrived.assign(tf.timestamp())
            with tf.control_dependencies([noted]):
                return train_step(data)

        model.train_step = timed

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.first = True

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.seconds = {"data": 0.0, "step": 0.0, "first_step": 0.0, "evaluation": 0.0}
        self.epoch_start = time.time()

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self.batch_start = time.time()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        now, arrived = time.time(), float(self.arrived.numpy())
        if self.first:
            self.seconds["first_step"] += now - self.batch_start
        else:
            self.seconds["data"] += arrived - self.batch_start
            self.seconds["step"] += now - arrived
        self.first = False

    def finish(self) -> dict[str, float]:
        """Return the epoch's seconds by kind; they sum to the epoch's wall-clock time."""
        total = time.time() - self.epoch_start
        return {**self.seconds, "other": total - sum(self.seconds.values())}
