"""One row of numbers for each epoch."""

from __future__ import annotations

from typing import Any

import keras

from tfcommx.optim import callbacks
from tfcommx.report import Progress
from tfcommx.training.run import Run
from tfcommx.training.timing import Timing


class EpochHistory(keras.callbacks.Callback):
    """Keeps one row of numbers per epoch, and shows it on rank 0.

    Comes last: it reads what the other callbacks put into the logs.
    """

    def __init__(
        self, run: Run, timing: Timing, compare: callbacks.CompareReplicas, progress: Progress
    ) -> None:
        super().__init__()
        self.run, self.timing, self.compare, self.progress = run, timing, compare, progress
        self.phases, self.schemes = run.recipe.phase_of_epoch(), run.recipe.scheme_of_epoch()
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.progress.step()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.rows.append(self.row(epoch, logs or {}))
        self.progress.epoch(self.rows[-1])

    def row(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of an epoch that has just ended."""
        scheme, seconds = self.schemes[epoch], self.timing.finish()
        busy = seconds["data"] + seconds["step"] + seconds["first_step"]
        loader, phase = self.run.data.report(epoch), self.phases[epoch]
        return {
            "epoch": epoch + 1,
            "resolution": phase.resolution,
            "route": scheme.route,
            "selection": scheme.selection,
            "density": scheme.density,
            "loss": float(logs["loss"]),
            "train_accuracy": float(logs["accuracy"]),
            # test_accuracy, and what else the task's scorer found
            **{name: value for name, value in logs.items() if name.startswith("test_")},
            "images_per_second": self.run.steps(phase) * self.run.global_batch(phase) / busy,
            "replicas_identical": bool(self.compare.identical),
            "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
            "loader": {name: round(value, 6) for name, value in loader.items()},
        }
