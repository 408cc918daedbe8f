"""Carry out a recipe: train on all ranks, evaluate on all ranks, return a summary."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import tfcommx as cx
from tfcommx import report
from tfcommx.optim import callbacks, checkpoint
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.evaluation import Evaluation
from tfcommx.training.history import EpochHistory, ShowProgress
from tfcommx.training.learning_rate import LearningRate
from tfcommx.training.look_ahead import LookAhead
from tfcommx.training.position import Position, StepCounter, pieces
from tfcommx.training.run import Run, prepare
from tfcommx.training.saving import Saving, StopAtEpochEnd, Stopped
from tfcommx.training.signals import StopRequests
from tfcommx.training.timing import BUSY, Timing

log = logging.getLogger("tfcommx")


@dataclass(frozen=True)
class Options:
    """What a run does besides what its recipe says."""

    # Continue after the last whole checkpoint in the run's folder, if there is one
    resume: bool = False
    # Save and stop after so many minutes of this process, > 0; None: when the run is through
    minutes: float | None = None
    # Device file of a terminal for the progress bar, if rank 0's own output is a pipe
    terminal: str | None = None
    # Write TensorBoard events while the run goes
    tensorboard: bool = False
    # Throughput of one process in each phase, from its dry run; empty: not known
    alone: tuple[float, ...] = ()


def train(recipe: Recipe, output_folder: Path, options: Options | None = None) -> dict[str, Any]:
    """Train as the recipe says; save as it says, and when the run is stopped; write the report.

    SIGTERM, SIGINT and SIGUSR1 to any rank, and a file `stop` in the folder, make all ranks save
    after the same step and return. So does the time limit.

    Args:
        recipe: what to train.
        output_folder: where checkpoints and report go.
        options: what else to do; None: the defaults.

    Returns:
        The summary, as in `summary.json`: of the whole run, with what it did before it was resumed.
        `seconds` is wall-clock time, except for the report's files; `throughput` is the
        `counted` of all ranks (images or word pieces) over the time in steps, tracing and waiting
        for data included, evaluation not; bytes are per rank, the whole run; `rows` has the
        epochs. Times are rank 0's. `target` says when the recipe's target was reached, `stopped`
        after which step and why the run was stopped, if it is not through. Without an epoch that
        has ended there is no report, and `rows` is empty.

    **Ranks:** all, with the same recipe. **Raises:** PlanError and DataError before the first step.
    """
    options, start = options or Options(), time.monotonic()
    end = None if options.minutes is None else start + 60 * options.minutes
    run = prepare(recipe, output_folder)
    requests = StopRequests(output_folder if run.comm.rank == 0 else None)
    with requests:
        keras.utils.set_random_seed(recipe.seed)
        model = recipe.build_model(run.objective)
        saved = last_checkpoint(run, options.resume)
        first = start_of(run, saved)
        optimizer = compile_model(model, run, recipe.scheme_of_epoch()[first.epoch])
        if saved:
            checkpoint.restore(model, run.checkpoint)
        if run.comm.rank == 0:
            # Of an earlier run: `tfcommx report` would take it for the report of this one
            with contextlib.suppress(OSError):
                (output_folder / "summary.json").unlink()
        totals = Totals(saved.notes if saved else {}, optimizer, start)
        run_callbacks = make_callbacks(run, first, saved, options, requests, end, totals)
        run_callbacks.timing.watch(model)
        stopped: dict[str, Any] = {}
        with run_callbacks.show.progress:
            try:
                fit_phases(model, run, first, run_callbacks)
            except Stopped as stop:
                stopped = {**stop.position._asdict(), "reason": stop.reason}
    run.data.close()
    summary = summarise(run, model, run_callbacks.history.rows) | totals.so_far()
    if options.alone:
        summary["alone"] = list(options.alone)
    if target := recipe.target:
        rows = summary["rows"]
        summary["target"] = report.time_to_target(rows, target.score, target.at_least)
    if stopped:
        summary["stopped"] = stopped
        tell_stop(run, stopped)
    if cx.is_chief() and summary["rows"]:
        report.write(summary, output_folder)
    return summary


class Totals:
    """Bytes and seconds of the whole run, with those before it was resumed."""

    KEYS = ("bytes_between_nodes", "bytes_between_nodes_dense", "seconds")

    def __init__(
        self, notes: dict[str, Any], optimizer: keras.optimizers.Optimizer, start: float
    ) -> None:
        self.before = {key: notes.get(key, 0) for key in self.KEYS}
        self.exchanger, self.start = optimizer.exchanger, start
        # A process may train twice
        self.at_start = self.exchanger.traffic()

    def seconds(self) -> float:
        """Return the seconds alone."""
        return float(self.before["seconds"] + time.monotonic() - self.start)

    def so_far(self) -> dict[str, Any]:
        """Return the sums by key."""
        found = {
            key: self.before[key] + value - self.at_start[key]
            for key, value in self.exchanger.traffic().items()
        } | {"seconds": self.seconds()}
        return {key: round(value, 1 if key == "seconds" else None) for key, value in found.items()}


def last_checkpoint(run: Run, resume: bool) -> checkpoint.Head | None:
    """Return the checkpoint to continue from; warn if the run will replace one.

    **Raises:** PlanError if a resumed run has no epochs left to train.
    """
    saved = checkpoint.last(run.checkpoint)
    if saved and not resume and run.comm.rank == 0:
        log.warning(
            "The first epoch replaces the checkpoint of %d epochs in %s. Stop now and add "
            "--resume to continue it.",
            saved.epoch + 1,
            run.checkpoint,
        )
    if saved and resume and saved.epoch + 1 >= run.recipe.epochs:
        raise cx.PlanError(
            f"A resumed run needs epochs left to train. {run.checkpoint} holds {saved.epoch + 1} "
            f"of {run.recipe.epochs}."
        )
    return saved if resume else None


def start_of(run: Run, saved: checkpoint.Head | None) -> Position:
    """Return the first step of a run.

    With another number of ranks, or another batch, an epoch has another number of steps, and other
    samples in each: the run goes on at the same share of the epoch.
    """
    if saved is None:
        return Position(0)
    epoch = saved.epoch + 1
    step = scaled(saved.step, run, saved)
    if step != saved.step and run.comm.rank == 0:
        ranks, batch = run.comm.topology.size, run.recipe.batch(run.recipe.phase_of_epoch()[epoch])
        log.warning(
            "The checkpoint was saved after step %d of %d; with %d ranks and a global batch of %d "
            "the epoch has %d steps, and goes on after step %d: some samples come twice in it, and "
            "some not at all.",
            saved.step,
            saved.steps,
            ranks,
            batch * ranks,
            run.steps_of(epoch),
            step,
        )
    return Position(epoch, step)


def scaled(count: int, run: Run, saved: checkpoint.Head) -> int:
    """Return steps of the epoch that was under way as steps of this run, of about the same samples.

    Args:
        count: in [0, saved.steps].
        run: with as many ranks and as large a batch as now.
        saved: the checkpoint.
    """
    steps = run.steps_of(saved.epoch + 1)
    return count if saved.steps in (0, steps) else count * steps // saved.steps


def tell_stop(run: Run, stopped: dict[str, Any]) -> None:
    """Say on rank 0 where the run was stopped, and how it goes on."""
    if run.comm.rank == 0:
        steps = run.steps_of(stopped["epoch"])
        print(
            f"Stopped by {stopped['reason']}, before step {stopped['step'] + 1} of {steps} of "
            f"epoch {stopped['epoch'] + 1}/{run.recipe.epochs}, and saved. Add --resume to go on.",
            flush=True,
        )


def compile_model(model: keras.Model, run: Run, scheme: cx.Scheme) -> keras.optimizers.Optimizer:
    """Compile the model with the recipe's optimizer, made distributed; return the optimizer."""
    optimizer = cx.DistributedOptimizer(
        run.recipe.optimizer.build(), scheme=scheme, links=run.recipe.links
    )
    model.compile(
        optimizer,
        loss=run.objective.loss(),
        metrics=list(run.objective.metrics()),
        jit_compile=False,
    )
    return optimizer


class RunCallbacks(NamedTuple):
    """The callbacks of a run, in the order in which Keras calls them."""

    # First: the others ask it
    counter: StepCounter
    timing: Timing
    learning_rate: LearningRate
    look_ahead: LookAhead
    switch: callbacks.SwitchScheme
    metrics: callbacks.AverageMetrics
    batch_norm: callbacks.AverageBatchNorm
    compare: callbacks.CompareReplicas
    evaluation: Evaluation
    # It reads what those before it put into the logs
    history: EpochHistory
    saving: Saving
    show: ShowProgress
    # Last: those before it must see the epoch's end
    stopping: StopAtEpochEnd


def make_callbacks(
    run: Run,
    first: Position,
    saved: checkpoint.Head | None,
    options: Options,
    requests: StopRequests,
    end: float | None,
    totals: Totals,
) -> RunCallbacks:
    """Make the callbacks of a run that begins at `first`, or continues from `saved` there."""
    recipe, counter, timing = run.recipe, StepCounter(), Timing()
    compare, notes = callbacks.CompareReplicas(), saved.notes if saved else {}
    schemes = enumerate(pairwise(recipe.scheme_of_epoch()), 1)
    changes = {at: new for at, (old, new) in schemes if new != old and at > first.epoch}
    counted = {"counted": run.objective.counted}
    rows = [report.of_today(row) | counted for row in notes.get("rows", ())]
    history = EpochHistory(run, counter, timing, compare, rows, totals.seconds)
    if saved and saved.step:
        under_way = notes.get("under_way", {})
        counts = (under_way.get(name, 0) for name in ("steps", "first_steps"))
        history.measured_before, first_steps = (scaled(count, run, saved) for count in counts)
        timing.continue_from(under_way.get("seconds", {}), first_steps)
    steps = run.steps_before(Position(recipe.epochs)) - run.steps_before(first)
    progress = report.Progress(steps, recipe.epochs, shown=cx.is_chief(), terminal=options.terminal)
    shown = options.tensorboard and cx.is_chief()
    events = report.Events(run.folder / "tensorboard") if shown else None
    saving = Saving(run, history, requests, end, totals.so_far)
    return RunCallbacks(
        counter,
        timing,
        LearningRate(run, counter),
        LookAhead(run),
        callbacks.SwitchScheme(changes),
        callbacks.AverageMetrics(),
        callbacks.AverageBatchNorm(),
        compare,
        Evaluation(run, timing),
        history,
        saving,
        ShowProgress(history, progress, events),
        StopAtEpochEnd(saving),
    )


def fit_phases(model: keras.Model, run: Run, first: Position, run_callbacks: RunCallbacks) -> None:
    """Train the phases one after the other, from `first` on. **Raises:** Stopped."""
    begin: list[keras.callbacks.Callback] = [callbacks.BroadcastState()]
    if first.step:  # In mid-epoch; one that begins, if only again, begins with new metrics
        begin.append(checkpoint.RestoreRankValues(run.checkpoint))
    phase = None
    for piece in pieces(run.phases, first, run.data.redistributes):
        if piece.phase != phase:
            phase = piece.phase
            run_callbacks.evaluation.at(model, run.recipe.phases[phase])
            # Keras traces with reduced retracing: without this, a second resolution would get a
            # graph of dynamic shapes, whose sums differ in the last bits from those of a run that
            # is resumed here
            model.make_train_function(force=True)
        if piece.epochs.start > first.epoch:
            run.data.redistribute(piece.epochs.start, run.comm)
        run_callbacks.counter.begin(piece, run.steps[phase])
        batches = run.batches(piece)
        if piece.step:
            build_metrics(model, batches)
        model.fit(
            batches,
            initial_epoch=piece.epochs.start,
            epochs=piece.epochs.stop,
            steps_per_epoch=run.steps[phase] - piece.step,
            verbose=0,
            shuffle=False,
            callbacks=[*begin, *run_callbacks],
        )
        begin = []


def build_metrics(model: keras.Model, batches: tf.data.Dataset) -> None:
    """Build the metrics, as the first step would: RestoreRankValues sets their sums."""
    inputs, targets, *weights = tf.nest.map_structure(
        lambda part: tf.zeros([size or 1 for size in part.shape], part.dtype), batches.element_spec
    )
    # What it adds to them, `fit` takes away
    model.compute_metrics(inputs, targets, model(inputs, training=False), *weights)


def summarise(run: Run, model: keras.Model, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run from the rows of its epochs, without its traffic and its time."""
    busy = sum(row["seconds"].get(kind, 0) for row in rows for kind in BUSY)
    samples = sum(row["steps"] * row["global_batch"] for row in rows)
    last = rows[-1] if rows else {"test_accuracy": None}
    scores = {name: value for name, value in last.items() if name.startswith("test_")}
    return {
        "name": run.recipe.name,
        **scores,
        "ranks": run.comm.topology.size,
        "nodes": run.comm.topology.nodes,
        "epochs": run.recipe.epochs,
        "parameters": model.count_params(),
        "counted": run.objective.counted,
        "throughput": round(samples / busy, 1) if busy else 0.0,
        "replicas_identical": all(row["replicas_identical"] for row in rows),
        "rows": rows,
    }
