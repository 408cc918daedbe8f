"""Callbacks that carry out a recipe: the learning rate, evaluation, and what `auto` is told.

The history of a run, one row per epoch, and its display while the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras

from tfcommx import callbacks
from tfcommx.optim.step_boundary import consolidate
from tfcommx.optim.wrapped import exchanger_of, steps_of_update
from tfcommx.recipes.recipe import Phase
from tfcommx.report import ProgressDisplay, TensorBoardEvents
from tfcommx.report.summary import target_text, time_to_target
from tfcommx.training.run import Run
from tfcommx.training.steps import Position, StepCounter, Timing


class SetLearningRate(keras.callbacks.Callback):
    """Sets the learning rate of every step from the recipe.

    A callback and not a Keras schedule, so that a saved optimizer loads without tfcommx.
    """

    def __init__(self, run: Run, counter: StepCounter) -> None:
        super().__init__()
        self.run, self.counter = run, counter

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Set the rate of the step that begins."""
        rate = rate_at(self.run, self.counter.phase, self.counter.position)
        self.model.optimizer.learning_rate = rate


def rate_at(run: Run, phase: int, position: Position) -> float:
    """Return the learning rate of a step of a phase.

    The schedule counts in steps of the first phase. A phase with another batch has more or fewer
    steps, and each of them is a fraction of those.
    """
    first, ranks = run.steps[0], run.comm.topology.size
    step = position.step * first / run.steps[phase]
    return run.recipe.rate(position.epoch, step, first, ranks)


class InformAuto(keras.callbacks.Callback):
    """Tells the scheme "auto" how many steps share a scheme; comes before SwitchScheme."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Tell it: if the epoch has another scheme, its first step makes a new plan."""
        accumulated = steps_of_update(self.model.optimizer)
        exchanger_of(self.model).requested.expected_run = self.run.expected_run(epoch, accumulated)


class Consolidate(keras.callbacks.Callback):
    """Makes the weights whole and equal at each epoch's end, if the strategy lets them drift.

    BroadcastState does it too, but is there in a run's first phase only.
    **Ranks:** all.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Average what drifted."""
        consolidate(self.model.optimizer)


class Evaluation(keras.callbacks.Callback):
    """Evaluates the model on the test samples at each epoch's end, at the phase's resolution.

    Every rank takes its own part of the test set; the scores are over all of them.
    **Ranks:** all.
    """

    def __init__(self, run: Run, timing: Timing) -> None:
        super().__init__()
        self.run, self.timing = run, timing

    def start_phase(self, model: keras.Model, phase: Phase) -> None:
        """Evaluate at this phase's batch and resolution from now on."""
        self.test = self.run.data.test(self.run.recipe.batch(phase), phase.resolution)
        # Traced anew for the new resolution
        self.score = self.run.objective.scorer(model)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        start = time.time()
        scores = self.score(self.test, self.run.comm.gather_objects)
        if logs is not None:
            logs.update(scores)
        self.timing.seconds["evaluation"] += time.time() - start


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

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.rows.append(self.row(epoch, logs or {}))
        self.measured_before = 0

    def clock(self) -> float:
        """Return the seconds of the run so far, without evaluation and saving.

        Opening the data set, building the model and tracing count.

        **Source:** DAWNBench's rules for ImageNet, as its organisers answered in issues 9, 12 and
        21 of github.com/stanford-futuredata/dawn-bench-entries.
        """
        parts: list[dict[str, float]] = [self.timing.seconds]
        parts += [row["seconds"] for row in self.rows]
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
        self,
        history: EpochHistory,
        progress: ProgressDisplay,
        events: TensorBoardEvents | None = None,
    ) -> None:
        super().__init__()
        self.history, self.progress, self.events = history, progress, events

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
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

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        rows, target = self.history.rows, self.history.run.recipe.target
        self.progress.epoch(rows[-1])
        if target:
            found = time_to_target(rows, target.score, target.at_least)
            if found["epoch"] == rows[-1]["epoch"]:
                self.progress.say(target_text(found))
        if self.events:
            self.events.epoch(self.history.rows[-1])
