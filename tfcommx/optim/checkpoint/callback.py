"""Checkpoint: save at the end of every epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras

from tfcommx.comm import process
from tfcommx.optim.checkpoint.files import read_heads, why_not_writable
from tfcommx.optim.checkpoint.saving import save
from tfcommx.optim.wrapped import wrapped_optimizers
from tfcommx.terms import PlanError, check_whole


class Checkpoint(keras.callbacks.Callback):
    """Save model, optimizers and residuals at the end of every epoch; the last ones are kept.

    Args:
        folder: where to; on every node, or on a file system that all nodes see.
        keep: saves that are kept, >= 1.

    **Ranks:** all. **Cost:** rank 0 writes the model, each rank its residuals (4 bytes per entry
    that it selects from, or sends in 16 bits).
    **Raises:** PlanError, before the first step, for a model that Keras cannot write down, for a
    damaged checkpoint.json, and for a folder that a rank cannot write to.
    """

    def __init__(self, folder: str | Path, keep: int = 1) -> None:
        super().__init__()
        self.folder, self.keep = Path(folder), check_whole("keep", keep, least=1)

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a folder or a model of which no checkpoint could be written."""
        everyone = process.current().gather_objects(why_not_writable(self.folder))
        for rank, reason in enumerate(everyone):
            if reason:
                raise PlanError(
                    "A checkpoint needs a folder that every rank can write to. Received "
                    f"{self.folder}, of which rank {rank} says: {reason}. Make room for it, or "
                    "give another."
                )
        read_heads(self.folder)
        wrapped_optimizers(self.model)
        try:
            json.dumps(keras.saving.serialize_keras_object(self.model))
        except Exception as error:  # Of any kind: it is raised by a get_config() of the user.
            raise PlanError(
                "A checkpoint needs a model that model.save can write down, with its optimizer "
                f"and its loss. Received {self.model.name!r}, for which Keras says: {error} Give "
                "that object a get_config(), or train without Checkpoint."
            ) from error

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save."""
        save(self.model, self.folder, epoch, self.keep)
