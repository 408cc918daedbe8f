"""Callbacks that carry out a recipe, and record and show its history, one row per epoch."""

import time
from typing import Any

import keras

from tfcommx.keras_internals.optimizers import steps_of
from tfcommx.optim.step_boundary import consolidate
from tfcommx.optim.wrapped import exchanger_of, steps_of_update
from tfcommx.recipes.recipe import Phase
from tfcommx.report.summary import target_text, time_to_target
from tfcommx.training.context import RunContext
from tfcommx.training.run import Run
from tfcommx.training.steps import Position


class RunCallback(keras.callbacks.Callback):
    """A callback of a run; takes the state that it shares with the run's others."""

    def __init__(self, context: RunContext) -> None:
        super().__init__()
        self.context = context


class SetLearningRate(RunCallback):
    """Sets the learning rate of every step from the recipe."""

    # Not a Keras schedule, because a saved optimizer must load without tfcommx
    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        counter = self.context.counter
        rate = rate_at(self.context.run, counter.phase, counter.position)
        self.model.optimizer.learning_rate = rate


def rate_at(run: Run, phase: int, position: Position) -> float:
    first, ranks = run.steps[0], run.comm.topology.size
    # The schedule counts in steps of the first phase, and a phase may have another batch
    step = position.step * first / run.steps[phase]
    return run.recipe.rate(position.epoch, step, first, ranks)


class InformAuto(RunCallback):
    """Tells the scheme "auto" how many steps share a scheme; runs before SwitchScheme."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        optimizer = self.model.optimizer
        expected = self.context.run.expected_run(epoch, steps_of_update(optimizer))
        expected = expected._replace(at=steps_of(optimizer))
        exchanger_of(self.model).requested.expected_run = expected


class Consolidate(keras.callbacks.Callback):
    """Makes the weights whole and equal at each epoch's end, if the strategy lets them drift."""

    # BroadcastState does it too, but only in the first phase of a run
    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        consolidate(self.model.optimizer)


class Evaluation(RunCallback):
    """Evaluates the model on the test samples at each epoch's end, at the phase's resolution.

    **Ranks:** all; each evaluates its own part of the test set, and the scores cover all parts.
    """

    def start_phase(self, model: keras.Model, phase: Phase) -> None:
        """Evaluate at this phase's batch and resolution from now on."""
        run = self.context.run
        self.test = run.data.test(run.recipe.batch(phase), phase.resolution)
        # A new scorer, traced for the new resolution
        self.score = run.objective.scorer(model)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        start = time.monotonic()
        scores = self.score(self.test, self.context.run.comm.gather_objects)
        if logs is not None:
            logs.update(scores)
        self.context.timing.seconds["evaluation"] += time.monotonic() - start


class EpochHistory(RunCallback):
    """Adds a row of numbers per epoch; reads the logs of the callbacks before it."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.context.rows.append(self.row(epoch, logs or {}))

    def row(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
        context, run = self.context, self.context.run
        scheme = run.recipe.scheme_of_epoch()[epoch]
        seconds = context.timing.epoch_seconds()
        phase, steps = context.counter.phase, context.counter.measured
        loader = run.data.report(epoch)
        return {
            "epoch": epoch + 1,
            "phase": phase + 1,
            "resolution": run.recipe.phases[phase].resolution,
            "ranks": run.comm.topology.size,
            "global_batch": run.global_batch(phase),
            "route": scheme.route,
            "selection": scheme.selection,
            "density": scheme.density,
            "loss": float(logs["loss"]),
            "train_accuracy": float(logs["accuracy"]),
            # `test_accuracy` and other scores of the task
            **{name: value for name, value in logs.items() if name.startswith("test_")},
            "steps": steps,
            # Number of these steps whose time is in seconds.first_step
            "first_steps": context.timing.first_steps,
            "counted": run.objective.counted,
            "throughput": steps * run.global_batch(phase) / context.timing.step_seconds(),
            "replicas_identical": bool(context.compare.identical),
            "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
            "clock_seconds": round(context.clock(), 3),
            # Sum over the run so far, like clock_seconds
            "bytes_between_nodes": int(context.totals.so_far()["bytes_between_nodes"]),
            "loader": {name: round(value, 6) for name, value in loader.items()},
        }


class ShowProgress(RunCallback):
    """Shows progress on rank 0; runs after the callbacks that measure it."""

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        context, logs = self.context, logs or {}
        run, counter, timing = context.run, context.counter, context.timing
        busy = max(timing.step_seconds(), 1e-9)
        samples = counter.measured * run.global_batch(counter.phase)
        status = {
            "epoch": counter.position.epoch + 1,
            "step": counter.after.step,
            "steps": counter.steps,
            "loss": float(logs.get("loss", "nan")),
            "accuracy": float(logs.get("accuracy", "nan")),
            "counted": run.objective.counted,
            "throughput": samples / busy,
            "data": timing.seconds["data"] / busy,
            "gradients": timing.seconds["gradients"] / busy,
        }
        context.progress.step(status)
        if context.events:
            context.events.step(run.steps_before(counter.after), status)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        context, rows = self.context, self.context.rows
        target = context.run.recipe.target
        context.progress.epoch(rows[-1])
        if target:
            reached = time_to_target(rows, target.score, target.at_least)
            if reached["epoch"] == rows[-1]["epoch"]:
                context.progress.say(target_text(reached))
        if context.events:
            context.events.epoch(rows[-1])
