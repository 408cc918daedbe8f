"""TensorBoard events, written during a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tfcommx.report.summary import more_scores

# Fields of an epoch's row that become scalars
SCALARS = ("loss", "train_accuracy", "test_accuracy", "throughput", "resolution", "density")
# Seconds between two points of the curves over steps
STEP_SECONDS = 1.0


class TensorBoardEvents:
    """Writes the numbers of epochs and steps as TensorBoard scalars.

    **Ranks:** rank 0 only.
    """

    def __init__(self, folder: Path) -> None:
        import tensorflow as tf  # Here, so that `tfcommx report` is quick

        self.writer = tf.summary.create_file_writer(str(folder))
        self.written_at = 0.0

    def step(self, number: int, status: dict[str, Any]) -> None:
        """Write the status that `ProgressDisplay.step` shows, about once a second."""
        import tensorflow as tf

        if time.monotonic() - self.written_at < STEP_SECONDS:
            return
        self.written_at = time.monotonic()
        with self.writer.as_default(step=number):
            for name in ("loss", "accuracy", "throughput"):
                tf.summary.scalar(f"step/{name}", status[name])
            for name in ("data", "gradients"):
                tf.summary.scalar(f"step/waiting_for_{name}", status[name])

    def epoch(self, row: dict[str, Any]) -> None:
        """Write an epoch's row at the number of the epoch."""
        import tensorflow as tf

        with self.writer.as_default(step=row["epoch"]):
            for name in SCALARS:
                tf.summary.scalar(name, row[name])
            for name, value in more_scores(row).items():
                tf.summary.scalar(f"test_{name}", value)
            for part, seconds in row["seconds"].items():
                tf.summary.scalar(f"seconds/{part}", seconds)
        self.writer.flush()
