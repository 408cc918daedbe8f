"""Saves checkpoints, and stops a run after the same step on all ranks.

rank 0   step  step  step ask step  step  step ask save, stop
rank 1   step  step  step ask step  step  step ask save, stop
                             SIGTERM
"""

import signal
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx import checkpoint
from tfcommx.training.context import RunContext
from tfcommx.training.run import settings_of
from tfcommx.training.steps import Position

# Approximate seconds between two requests of the ranks to each other. Much less than 5, because
# horovodrun kills the ranks 5 s after it was asked to end
ASK_SECONDS = 0.5
# Largest number of steps between two requests
ASK_STEPS = 1000


class Stopped(Exception):
    """Ends `fit` on all ranks after the same step, once the run is saved."""

    def __init__(self, position: Position, reason: str) -> None:
        super().__init__(reason)
        self.position, self.reason = position, reason


class SaveAndStop(keras.callbacks.Callback):
    """Saves the state that a run needs to resume, and stops it if any rank is asked to.

    About twice a second the ranks ask each other whether one of them was asked to stop, and whether
    it is time to save or to end by rank 0's clock. At the end of an epoch, this callback saves and
    StopAtEpochEnd stops.

    **Ranks:** all. **Cost:** an allreduce of 16 bytes about twice a second.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__()
        self.context, self._patience = context, checkpoint.Patience()
        self.settings = context.run.recipe.checkpoint
        self.saved_at, self.asked_at = time.monotonic(), time.monotonic()
        # Steps until the ranks ask each other again, and between their last two requests
        self._until, self._between = 1, 1

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self._until -= 1
        after = self.context.counter.after
        if after.step == self.context.counter.steps:
            self.context.snapshots.end_epoch(after.epoch)
            return  # `on_epoch_end` saves
        stop, save = self.ask() if self._until <= 0 else ("", False)
        if stop:
            self._save(after)
            raise Stopped(after, stop)
        interval = self.settings.every_steps
        due = interval is not None and self.context.run.steps_before(after) % interval == 0
        if save or due:
            self._patience.save(lambda: self._save(after))
        self.context.snapshots.after_step(
            after.epoch, after.step, self.context.counter.steps, notes=lambda: self._notes(after)
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        seconds = self.context.timing.seconds
        before = seconds["saving"]
        after = Position(epoch + 1)
        if after.epoch == self.context.run.recipe.epochs:
            self._save(after)  # An error ends the run, because no later save would follow
        else:
            self._patience.save(lambda: self._save(after))
        # The row was made before the save
        self.context.rows[-1]["seconds"]["saving"] += round(seconds["saving"] - before, 3)

    def ask(self) -> tuple[str, bool]:
        """Return the reason why all ranks stop, or "", and True if they save. **Ranks:** all."""
        must_stop, time_s = self.context.requests.asked(), time.monotonic()
        if (
            must_stop
            and self.context.snapshots.supervised
            and self.context.requests.reason == signal.SIGTERM.name
        ):
            # Under a supervisor a host that is asked to end leaves, and the next generation
            # continues without it
            self.context.snapshots.leave()
            must_stop = False
        # Rank 0's alone, because the ranks' clocks differ, and all must save after the same step
        clock = [0.0, 0.0, 0.0]
        if self.context.run.comm.rank == 0:
            minutes = self.settings.every_minutes
            step_s = max(time_s - self.asked_at, 1e-6) / self._between
            clock = [
                float(self.context.end is not None and time_s >= self.context.end),
                float(minutes is not None and time_s - self.saved_at >= 60 * minutes),
                # Steps until the ranks ask each other again
                float(int(np.clip(ASK_SECONDS / step_s, 1, ASK_STEPS))),
            ]
        # Not on the GPU, because the result is read at once
        with tf.device("/cpu:0"):
            votes = self.context.run.comm.allreduce(
                tf.constant([float(must_stop), *clock]), "world", "tfcommx/saving"
            ).numpy()
        self._until = self._between = max(1, round(float(votes[3])))
        self.asked_at = time.monotonic()
        if votes[0]:
            reasons = self.context.run.comm.gather_objects(self.context.requests.reason)
            named = [f"{why} on rank {rank}" for rank, why in enumerate(reasons) if why]
            return named[0], True
        return ("the time limit" if votes[1] else ""), bool(votes[2])

    def _save(self, after: Position) -> None:
        start = time.monotonic()
        checkpoint.save(
            self.model,
            self.context.run.checkpoint,
            after.epoch - 1,
            self.settings.keep,
            step=after.step,
            steps=self.context.counter.steps if after.step else 0,
            notes=self._notes(after),
        )
        self.saved_at = time.monotonic()
        self.context.timing.seconds["saving"] += time.monotonic() - start

    def _notes(self, after: Position) -> dict[str, Any]:
        context, under_way = self.context, {}
        if after.step:
            timing = context.timing
            counts = {"steps": context.counter.measured, "first_steps": timing.first_steps}
            under_way = {"seconds": timing.epoch_seconds(), **counts}
        settings = settings_of(context.run.recipe)
        run = {"rows": context.rows, "under_way": under_way, "settings": settings}
        return run | context.totals.so_far() | context.snapshots.notes()


class StopAtEpochEnd(keras.callbacks.Callback):
    """Stops the run at the end of an epoch if any rank is asked to; the last callback.

    **Ranks:** all.
    """

    def __init__(self, saving: SaveAndStop) -> None:
        super().__init__()
        self.saving = saving

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        stop, _ = self.saving.ask()
        if stop and epoch + 1 < self.saving.context.run.recipe.epochs:
            raise Stopped(Position(epoch + 1), stop)
