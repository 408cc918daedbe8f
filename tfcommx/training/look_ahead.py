"""Telling "auto" how many steps of the run share a scheme, before each change of it."""

from __future__ import annotations

import keras

from tfcommx.optim.wrapped import exchanger_of, steps_of_update
from tfcommx.training.run import Run


class LookAhead(keras.callbacks.Callback):
    """Tells "auto" what a run knows of the epochs that share a scheme; before SwitchScheme."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Tell it: if the epoch has another scheme, its first step makes a new plan."""
        accumulated = steps_of_update(self.model.optimizer)
        exchanger_of(self.model).requested.expected_run = self.run.expected_run(epoch, accumulated)
