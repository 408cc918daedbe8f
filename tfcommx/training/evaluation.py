"""Evaluation: accuracy on the test set after each epoch."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.recipes.datasets.shift import resize
from tfcommx.training.timing import Timing

EVALUATION_BATCH = 500  # images; large enough to be fast, small enough to stay in the cache


class Evaluation(keras.callbacks.Callback):
    """At each epoch's end counts the test images that the model gets right, at the phase's
    resolution.

    Every rank takes its own part of the test set; the counts are summed exactly. **Ranks:** all.
    """

    def __init__(self, comm: Any, test_x: np.ndarray, test_y: np.ndarray, timing: Timing) -> None:
        super().__init__()
        self.comm, self.timing = comm, timing
        part = slice(comm.rank, None, comm.topology.size)
        self.test = tf.data.Dataset.from_tensor_slices((test_x[part], test_y[part])).batch(
            EVALUATION_BATCH
        )
        self.resolution = test_x.shape[1]

    def at(self, resolution: int) -> None:
        """Evaluate at this resolution from now on."""
        self.resolution = resolution
        self.count = tf.function(self._count)  # the new resolution is traced into it

    def _count(self, pictures: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        logits = self.model(resize(pictures, self.resolution), training=False)
        return tf.math.count_nonzero(tf.argmax(logits, axis=1) == tf.cast(labels, tf.int64))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        start = time.time()
        mine = [(int(self.count(pictures, labels)), len(labels)) for pictures, labels in self.test]
        right, seen = np.sum(self.comm.gather_objects(np.sum(mine, axis=0)), axis=0)
        if logs is not None:
            logs["test_accuracy"] = float(right / seen)
        self.timing.seconds["evaluation"] += time.time() - start
