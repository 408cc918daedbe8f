"""Evaluation: accuracy on the test set after each epoch."""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf

from tfcommx.training.run import Run
from tfcommx.training.timing import Timing

# Samples; large enough to be fast, small enough to stay in the processor's cache
EVALUATION_BATCH = 500


class Evaluation(keras.callbacks.Callback):
    """Counts at each epoch's end the test samples that the model gets right.

    At the phase's resolution. Every rank takes its own part of the test set; the counts are summed
    exactly. **Ranks:** all.
    """

    def __init__(self, run: Run, timing: Timing) -> None:
        super().__init__()
        self.comm, self.timing, self.objective = run.comm, timing, run.objective
        self.inputs = run.recipe.data.test_inputs
        part = slice(run.comm.rank, None, run.comm.topology.size)
        self.test = tf.data.Dataset.from_tensor_slices(
            (run.samples.test_inputs[part], run.samples.test_labels[part])
        ).batch(EVALUATION_BATCH)

    def at(self, resolution: int) -> None:
        """Evaluate at this resolution from now on."""
        self.resolution = resolution
        # The new resolution is traced into it
        self.count = tf.function(self._count)

    def _count(self, pictures: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        outputs = self.model(self.inputs(pictures, self.resolution), training=False)
        return self.objective.count_right(outputs, labels)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        start = time.time()
        mine = [(int(self.count(pictures, labels)), len(labels)) for pictures, labels in self.test]
        right, seen = np.sum(self.comm.gather_objects(np.sum(mine, axis=0)), axis=0)
        if logs is not None:
            logs["test_accuracy"] = float(right / seen)
        self.timing.seconds["evaluation"] += time.time() - start
