"""Saves checkpoints, and stops a run after the same step on all ranks.

rank 0   step  step  step ask step  step  step ask save, stop
rank 1   step  step  step ask step  step  step ask save, stop
                             SIGTERM

Requests to save and stop a run: signals, or a file.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx import checkpoint
from tfcommx.training.callbacks import EpochHistory
from tfcommx.training.run import Run
from tfcommx.training.steps import Position

# mpirun forwards SIGUSR1 to the ranks, and ends them for SIGTERM
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# In the run's folder; `touch` it to stop the run
STOP_FILE = "stop"


class StopRequests:
    """Catches the first signal while it is entered; a second one has its usual effect.

    Args:
        folder: of the run, whose file `stop` counts as a signal; None on ranks other than rank 0.

    **Ranks:** each by itself; the ranks agree afterwards.
    """

    def __init__(self, folder: Path | None) -> None:
        self.file = None if folder is None else folder / STOP_FILE
        self.reason = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequests:
        # Python allows signal handlers there only
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._catch) for one in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def asked(self) -> bool:
        """Return whether this rank was asked to stop."""
        if self.file is not None and self.file.exists():
            self.reason = self.reason or f"the file {self.file}"
            # Else it would stop the next run too
            with contextlib.suppress(OSError):
                self.file.unlink()
        return bool(self.reason)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}


# About how many seconds pass until the ranks ask each other again: horovodrun kills them 5 s after
# it was asked to end
ASK_SECONDS = 0.5
# The most steps in between
ASK_STEPS = 1000


class Stopped(Exception):
    """Ends `fit` on all ranks after the same step, once the run is saved.

    Args:
        position: the next step.
        reason: what stopped the run, as a text for the user.
    """

    def __init__(self, position: Position, reason: str) -> None:
        super().__init__(reason)
        self.position, self.reason = position, reason


class SaveAndStop(keras.callbacks.Callback):
    """Saves what a run needs to resume, and stops it if any rank is asked to.

    About twice a second the ranks ask each other whether one of them was asked to stop, and whether
    it is time to save or to end by rank 0's clock. So all save after the same step. At an epoch's
    end this saves, and StopAtEpochEnd stops.

    Args:
        run: what is trained.
        history: its rows are saved too; it comes before this callback.
        requests: requests to stop this rank.
        end: when the run must end, by `time.monotonic`; None: at its last epoch.
        notes: returns what else to save; called at each save.
        snapshots: in memory; takes SIGTERM in a supervised run.

    **Ranks:** all. **Cost:** an allreduce of 16 bytes about twice a second.
    """

    def __init__(
        self,
        run: Run,
        history: EpochHistory,
        requests: StopRequests,
        end: float | None,
        notes: Callable[[], dict[str, Any]],
        snapshots: checkpoint.Snapshots,
    ) -> None:
        super().__init__()
        self.run, self.history, self.counter = run, history, history.counter
        self.requests, self.end, self.notes = requests, end, notes
        self.snapshots, self._patience = snapshots, checkpoint.Patience()
        self.settings = run.recipe.checkpoint
        self.saved_at, self.asked_at = time.monotonic(), time.monotonic()
        # Steps until the ranks ask each other again, and between the last two times
        self._until, self._between = 1, 1

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Ask the other ranks if it is time; save and stop if they agree to."""
        self._until -= 1
        after = self.counter.after
        if after.step == self.counter.steps:
            self.snapshots.end_epoch(after.epoch)
            return  # The epoch's end follows
        stop, save = self.ask() if self._until <= 0 else ("", False)
        if stop:
            self._save(after)
            raise Stopped(after, stop)
        if save or self._due(after):
            self._patience.save(lambda: self._save(after))
        self.snapshots.after_step(
            after.epoch, after.step, self.counter.steps, notes=lambda: self._notes(after)
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        seconds = self.history.timing.seconds
        before = seconds["saving"]
        self._patience.save(lambda: self._save(Position(epoch + 1)))
        # The row was made before the save
        self.history.rows[-1]["seconds"]["saving"] += round(seconds["saving"] - before, 3)

    def _due(self, after: Position) -> bool:
        every = self.settings.every_steps
        return every is not None and self.run.steps_before(after) % every == 0

    def ask(self) -> tuple[str, bool]:
        """Return the reason why all ranks stop, empty if they do not, and whether to save.

        **Ranks:** all. **Cost:** an allreduce of 16 bytes.
        """
        asked, now = self.requests.asked(), time.monotonic()
        if asked and self.snapshots.supervised and self.requests.reason == signal.SIGTERM.name:
            self.snapshots.leave()
            asked = False
        clock = [0.0, 0.0, 0.0]
        if self.run.comm.rank == 0:
            minutes = self.settings.every_minutes
            clock = [
                float(self.end is not None and now >= self.end),
                float(minutes is not None and now - self.saved_at >= 60 * minutes),
                float(self._steps_to_next(now)),
            ]
        with tf.device("/cpu:0"):
            votes = self.run.comm.allreduce(
                tf.constant([float(asked), *clock]), "world", "tfcommx/saving"
            ).numpy()
        self._until = self._between = max(1, round(float(votes[3])))
        self.asked_at = time.monotonic()
        if votes[0]:
            reasons = self.run.comm.gather_objects(self.requests.reason)
            named = [f"{why} on rank {rank}" for rank, why in enumerate(reasons) if why]
            return named[0], True
        return ("the time limit" if votes[1] else ""), bool(votes[2])

    def _steps_to_next(self, now: float) -> int:
        """Return the steps that take about ASK_SECONDS."""
        step = max(now - self.asked_at, 1e-6) / self._between
        return int(np.clip(ASK_SECONDS / step, 1, ASK_STEPS))

    def _save(self, after: Position) -> None:
        start = time.time()
        checkpoint.save(
            self.model,
            self.run.checkpoint,
            after.epoch - 1,
            self.settings.keep,
            step=after.step,
            steps=self.counter.steps if after.step else 0,
            notes=self._notes(after),
        )
        self.saved_at = time.monotonic()
        self.history.timing.seconds["saving"] += time.time() - start

    def _notes(self, after: Position) -> dict[str, Any]:
        timing, under_way = self.history.timing, {}
        if after.step:
            steps = self.history.steps_measured()
            counts = {"steps": steps, "first_steps": timing.first_steps}
            under_way = {"seconds": timing.epoch_seconds(), **counts}
        run = {"rows": self.history.rows, "under_way": under_way}
        return run | self.notes() | self.snapshots.notes()


class StopAtEpochEnd(keras.callbacks.Callback):
    """Stops the run at an epoch's end if any rank is asked to; the last callback.

    **Ranks:** all.
    """

    def __init__(self, saving: SaveAndStop) -> None:
        super().__init__()
        self.saving = saving

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Ask the other ranks; stop if one was asked to, unless this was the last epoch."""
        stop, _ = self.saving.ask()
        if stop and epoch + 1 < self.saving.run.recipe.epochs:
            raise Stopped(Position(epoch + 1), stop)
