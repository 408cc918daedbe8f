"""One row of numbers for each epoch."""

from __future__ import annotations

from typing import Any

import keras

from tfcommx.data.cache.cache import DataCache
from tfcommx.recipes.recipe import Recipe
from tfcommx.report import Progress
from tfcommx.training.timing import Timing


class EpochHistory(keras.callbacks.Callback):
    """Keeps one row of numbers per epoch, and shows it on rank 0. Comes last: it reads what the
    others put into the logs.
    """

    def __init__(
        self,
        recipe: Recipe,
        timing: Timing,
        compare: Any,
        cache: DataCache,
        images_per_epoch: int,
        progress: Progress,
    ) -> None:
        super().__init__()
        self.phases, self.schemes, self.timing, self.compare = (
            recipe.phase_of_epoch(),
            recipe.scheme_of_epoch(),
            timing,
            compare,
        )
        self.cache = cache
        self.images, self.progress = images_per_epoch, progress
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.progress.step()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        logs, phase, scheme = logs or {}, self.phases[epoch], self.schemes[epoch]
        seconds = self.timing.finish()
        busy = seconds["data"] + seconds["step"] + seconds["first_step"]
        self.rows.append(
            {
                "epoch": epoch + 1,
                "resolution": phase.resolution,
                "route": scheme.route,
                "selection": scheme.selection,
                "density": scheme.density,
                "loss": float(logs["loss"]),
                "train_accuracy": float(logs["accuracy"]),
                "test_accuracy": logs["test_accuracy"],
                "images_per_second": self.images / busy,
                "replicas_identical": bool(self.compare.identical),
                "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
                "loader": {
                    name: round(value, 6) for name, value in self.cache.report(epoch).items()
                },
            }
        )
        self.progress.epoch(self.rows[-1])
