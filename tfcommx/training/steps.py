"""The steps of a run: its position, the calls of `fit` that remain, and the counter.

Phases of 2 and 1 epochs of 10 steps, resumed after step 4 of the second epoch:

epoch 0 |==========| done
epoch 1 |====      | FitCall(phase 0, epochs 1 to 2, step 4): six steps remain
epoch 2 |          | FitCall(phase 1, epochs 2 to 3, step 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras


class Position(NamedTuple):
    """The next step of a run."""

    # From 0; equal to the number of epochs at the end of the run
    epoch: int
    # Of the epoch, from 0
    step: int = 0


class FitCall(NamedTuple):
    """Epochs of one phase that one call of `fit` trains."""

    # Number of the phase, from 0
    phase: int
    # Counted over the whole run; a single one if `step` is not 0
    epochs: range
    # First step of the first epoch
    step: int = 0


def fit_calls(phases: Sequence[int], start: Position, one_by_one: bool = False) -> list[FitCall]:
    """Return the calls of `fit` that remain of a run.

    >>> fit_calls([2, 1], Position(1, 4))
    [FitCall(phase=0, epochs=range(1, 2), step=4), FitCall(phase=1, epochs=range(2, 3), step=0)]

    Args:
        phases: epochs of each phase, >= 1.
        start: the first step.
        one_by_one: a call for each epoch, so that nothing reads ahead over the end of an epoch.
    """
    found, end = [], 0
    for number, epochs in enumerate(phases):
        first, end = max(end, start.epoch), end + epochs
        if first < end and first == start.epoch and start.step:
            found.append(FitCall(number, range(first, first + 1), start.step))
            first += 1
        if one_by_one:
            found += [FitCall(number, range(epoch, epoch + 1)) for epoch in range(first, end)]
        elif first < end:
            found.append(FitCall(number, range(first, end)))
    return found


class StepCounter(keras.callbacks.Callback):
    """Counts epochs and steps of the whole run, also in a resumed epoch; the first callback."""

    def __init__(self) -> None:
        super().__init__()
        # The current step, or the last one
        self.position = Position(0)
        # Steps of the epoch; steps of it that this process has taken; number of the phase
        self.steps, self.taken, self.phase = 0, 0, 0
        self._offset = 0

    def begin(self, call: FitCall, steps: int) -> None:
        """Prepare for a call of `fit`; `steps` are those of one whole epoch."""
        self.phase, self.steps, self._offset = call.phase, steps, call.step

    @property
    def after(self) -> Position:
        """The step after the last one."""
        return self.position._replace(step=self.position.step + 1)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.position, self.taken = Position(epoch, self._offset), 0

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Count a step; Keras counts from the start of this process's part of the epoch."""
        self.position = self.position._replace(step=self._offset + batch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.taken += 1
