"""Where a run is: the epoch and the step, what is left of it, and who counts.

phases of 2 and 1 epochs, 10 steps each; a run that was saved after step 4 of its second epoch:

epoch 0 |          | done
epoch 1 |====      | Piece(phase 0, epochs 1 to 2, step 4): six steps are left
epoch 2 |          | Piece(phase 1, epochs 2 to 3, step 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras


class Position(NamedTuple):
    """The next step of a run."""

    # From 0; the number of epochs: the run has ended
    epoch: int
    # Of the epoch, from 0
    step: int = 0


class Piece(NamedTuple):
    """Epochs of one phase that are served in one go."""

    # Number of the phase, from 0
    phase: int
    # Counted over the whole run; a single one if `step` is not 0
    epochs: range
    # First step of the first epoch
    step: int = 0


def pieces(phases: Sequence[int], start: Position, one_by_one: bool = False) -> list[Piece]:
    """Cut what is left of a run into pieces.

    >>> pieces([2, 1], Position(1, 4))
    [Piece(phase=0, epochs=range(1, 2), step=4), Piece(phase=1, epochs=range(2, 3), step=0)]

    Args:
        phases: epochs of each phase, >= 1.
        start: what comes first.
        one_by_one: every epoch by itself: nothing may read ahead over the end of an epoch.
    """
    found, end = [], 0
    for number, epochs in enumerate(phases):
        first, end = max(end, start.epoch), end + epochs
        if first < end and first == start.epoch and start.step:
            found.append(Piece(number, range(first, first + 1), start.step))
            first += 1
        if one_by_one:
            found += [Piece(number, range(epoch, epoch + 1)) for epoch in range(first, end)]
        elif first < end:
            found.append(Piece(number, range(first, end)))
    return found


class StepCounter(keras.callbacks.Callback):
    """Counts epochs and steps of the whole run, also in an epoch that is continued; comes first."""

    def __init__(self) -> None:
        super().__init__()
        # The step that is under way, or was taken last
        self.position = Position(0)
        # Steps of the epoch; those of this process in it; number of the phase
        self.steps, self.taken, self.phase = 0, 0, 0
        self._offset = 0

    def begin(self, piece: Piece, steps: int) -> None:
        """Take note of what is trained next; `steps` are those of one whole epoch."""
        self.phase, self.steps, self._offset = piece.phase, steps, piece.step

    @property
    def after(self) -> Position:
        """The step after the one that was taken last."""
        return self.position._replace(step=self.position.step + 1)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Begin an epoch."""
        self.position, self.taken = Position(epoch, self._offset), 0

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Count a step; Keras counts those of this process."""
        self.position = self.position._replace(step=self._offset + batch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Count a step that was taken."""
        self.taken += 1
