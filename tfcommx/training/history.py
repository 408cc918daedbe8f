"""The history of a run, one row per epoch, and its display while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfcommx.optim import callbacks
from tfcommx.report import Progress, TensorBoardEvents
from tfcommx.report.summary import target_text, time_to_target
from tfcommx.training.run import Run
from tfcommx.training.steps import StepCounter
from tfcommx.training.timing import Timing


class EpochHistory(keras.callbacks.Callback):
    """Keeps a row of numbers per epoch, rows of an earlier process included.

    It reads what the callbacks before it have put into the logs. `elapsed` and `sent` return the
    seconds of the whole run so far, and the bytes that this rank has sent to other nodes.
    """

    def __init__(
        self,
        run: Run,
        counter: StepCounter,
        timing: Timing,
        compare: callbacks.CompareReplicas,
        rows: list[dict[str, Any]],
        elapsed: Callable[[], float],
        sent: Callable[[], int],
    ) -> None:
        super().__init__()
        self.elapsed, self.sent = elapsed, sent
        self.run, self.counter, self.timing, self.compare = run, counter, timing, compare
        self.schemes, self.rows = run.recipe.scheme_of_epoch(), rows
        # Steps of the current epoch that an earlier process took and measured
        self.measured_before = 0

    def steps_measured(self) -> int:
        """Return the steps of the epoch so far, those of an earlier process included."""
        return self.measured_before + self.counter.taken

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.rows.append(self.row(epoch, logs or {}))
        self.measured_before = 0

    def clock(self) -> float:
        """Return the seconds of the run so far, without evaluation and saving.

        Opening the data set, building the model and tracing count.

        **Source:** DAWNBench's rules for ImageNet, as its organisers answered in issues 9, 12 and
        21 of github.com/stanford-futuredata/dawn-bench-entries.
        """
        parts = [self.timing.seconds, *(row["seconds"] for row in self.rows)]
        return self.elapsed() - sum(part["evaluation"] + part["saving"] for part in parts)

    def row(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of an epoch that has just ended."""
        scheme, seconds = self.schemes[epoch], self.timing.epoch_seconds()
        phase, steps = self.counter.phase, self.steps_measured()
        loader = self.run.data.report(epoch)
        return {
            "epoch": epoch + 1,
            "phase": phase + 1,
            "resolution": self.run.recipe.phases[phase].resolution,
            "ranks": self.run.comm.topology.size,
            "global_batch": self.run.global_batch(phase),
            "route": scheme.route,
            "selection": scheme.selection,
            "density": scheme.density,
            "loss": float(logs["loss"]),
            "train_accuracy": float(logs["accuracy"]),
            # test_accuracy, and other scores of the task
            **{name: value for name, value in logs.items() if name.startswith("test_")},
            "steps": steps,
            # Of these, those whose time is in seconds.first_step
            "first_steps": self.timing.first_steps,
            "counted": self.run.objective.counted,
            "throughput": steps * self.run.global_batch(phase) / self.timing.step_seconds(),
            "replicas_identical": bool(self.compare.identical),
            "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
            "clock_seconds": round(self.clock(), 3),
            # Of the run so far, as the clock
            "bytes_between_nodes": self.sent(),
            "loader": {name: round(value, 6) for name, value in loader.items()},
        }


class ShowProgress(keras.callbacks.Callback):
    """Shows progress on rank 0; comes after the callbacks that measure it."""

    def __init__(
        self, history: EpochHistory, progress: Progress, events: TensorBoardEvents | None = None
    ) -> None:
        super().__init__()
        self.history, self.progress, self.events = history, progress, events

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        history, counter, logs = self.history, self.history.counter, logs or {}
        busy = max(history.timing.step_seconds(), 1e-9)
        samples = history.steps_measured() * history.run.global_batch(counter.phase)
        status = {
            "epoch": counter.position.epoch + 1,
            "step": counter.after.step,
            "steps": counter.steps,
            "loss": float(logs.get("loss", "nan")),
            "accuracy": float(logs.get("accuracy", "nan")),
            "counted": history.run.objective.counted,
            "throughput": samples / busy,
            "data": history.timing.seconds["data"] / busy,
            "gradients": history.timing.seconds["gradients"] / busy,
        }
        self.progress.step(status)
        if self.events:
            self.events.step(history.run.steps_before(counter.after), status)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        rows, target = self.history.rows, self.history.run.recipe.target
        self.progress.epoch(rows[-1])
        if target:
            found = time_to_target(rows, target.score, target.at_least)
            if found["epoch"] == rows[-1]["epoch"]:
                self.progress.say(target_text(found))
        if self.events:
            self.events.epoch(self.history.rows[-1])
