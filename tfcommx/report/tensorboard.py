"""TensorBoard events, written during a run."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfcommx.core import log
from tfcommx.report.summary import more_scores

# Fields of an epoch's row that become scalars
SCALARS = ("loss", "train_accuracy", "test_accuracy", "throughput", "resolution", "density")
# Seconds between two points of the curves over steps
STEP_SECONDS = 1.0


class TensorBoardEvents:
    """Writes the numbers of epochs and steps as TensorBoard scalars.

    After the first failure, as on a full disk, which causes a warning, nothing more is written,
    because the training does not need the curves.

    **Ranks:** rank 0 only.
    """

    def __init__(self, folder: Path) -> None:
        import tensorflow as tf  # Here, so that `tfcommx report` is quick

        self.folder, self.written_at, self.failed = folder, 0.0, False
        with self._until_failure():
            self.writer = tf.summary.create_file_writer(str(folder))

    @contextlib.contextmanager
    def _until_failure(self) -> Iterator[None]:
        import tensorflow as tf

        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            self.failed = True
            log.warning(
                "TensorBoard's events in %s end here: %s. Make room, or give the next run another "
                "folder.",
                self.folder,
                " ".join(str(error).split())[:200],
            )

    def step(self, number: int, status: dict[str, Any]) -> None:
        """Write the status that `ProgressDisplay.step` shows, about once a second."""
        import tensorflow as tf

        if self.failed or time.monotonic() - self.written_at < STEP_SECONDS:
            return
        self.written_at = time.monotonic()
        with self._until_failure(), self.writer.as_default(step=number):
            for name in ("loss", "accuracy", "throughput"):
                tf.summary.scalar(f"step/{name}", status[name])
            for name in ("data", "gradients"):
                tf.summary.scalar(f"step/waiting_for_{name}", status[name])

    def epoch(self, row: dict[str, Any]) -> None:
        """Write an epoch's row at the number of the epoch."""
        import tensorflow as tf

        if self.failed:
            return
        with self._until_failure():
            with self.writer.as_default(step=row["epoch"]):
                for name in SCALARS:
                    tf.summary.scalar(name, row[name])
                for name, value in more_scores(row).items():
                    tf.summary.scalar(f"test_{name}", value)
                for part, seconds in row["seconds"].items():
                    tf.summary.scalar(f"seconds/{part}", seconds)
            self.writer.flush()
