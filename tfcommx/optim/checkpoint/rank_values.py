"""RestoreRankValues: give each rank its own statistics and metrics back in mid-epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfcommx.comm import process
from tfcommx.optim.checkpoint.files import residuals_name
from tfcommx.optim.checkpoint.memory.newest import newest
from tfcommx.optim.checkpoint.records import read_own
from tfcommx.optim.keras_internals import finalize_layers, statistics_of
from tfcommx.terms import local_path


class RestoreRankValues(keras.callbacks.Callback):
    """Give each rank back what it alone had in mid-epoch: batch norm's statistics, metrics' sums.

    Put it behind BroadcastState, which sets those of one rank everywhere. Metrics must be built.
    Nothing is done for a checkpoint of an epoch's end, where all are equal, and with another number
    of ranks.

    Args:
        folder: as `restore` took it.

    **Ranks:** all.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = local_path("folder", folder)
        self.values: list[np.ndarray] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Read the values of this rank, and set the statistics."""
        here, found = process.current(), newest(self.folder)
        if found is None or not found.head.step or found.head.ranks != here.topology.size:
            return
        self.values = read_own(found.folder / residuals_name(found.head.save, here.rank))
        self._assign(statistics_of(self.model), self.values)
        finalize_layers(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the metrics, which Keras has just reset."""
        count = len(statistics_of(self.model))
        self._assign(self.model.metrics_variables, self.values[count:])
        self.values = []

    @staticmethod
    def _assign(variables: Sequence[keras.Variable], values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(variables, values, strict=False):
            variable.assign(value)
