"""Train a recipe on all ranks, and return a summary."""

import contextlib
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras

import tfcommx as cx
from tfcommx import callbacks, checkpoint, report
from tfcommx.checkpoint.files import read_own_head
from tfcommx.checkpoint.newest import continues_from_memory, newest_of_run
from tfcommx.checkpoint.saving import claim
from tfcommx.core import log
from tfcommx.keras_internals.fit import build_metrics
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.callbacks import (
    Consolidate,
    EpochHistory,
    Evaluation,
    InformAuto,
    SetLearningRate,
    ShowProgress,
)
from tfcommx.training.context import RunContext, Totals
from tfcommx.training.run import Run, prepare, settings_of
from tfcommx.training.save_and_stop import SaveAndStop, StopAtEpochEnd, Stopped
from tfcommx.training.steps import STEP_KINDS, Position, fit_calls
from tfcommx.training.stop_requests import StopRequests

# Beginnings of the names of settings that do not change the training
UNRELATED = ("checkpoint.", "name", "target", "threads")


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run in addition to its recipe."""

    # Continue after the last complete checkpoint in the run's folder, if one exists
    resume: bool = False
    # Save and stop after this many minutes of this process, > 0; None: no limit
    minutes: float | None = None
    # Device file of a terminal for the progress bar if rank 0's output is a pipe
    terminal: str | None = None
    # Throughput of one process in each phase, from its dry run; empty: unknown
    alone: tuple[float, ...] = ()


def train(
    recipe: Recipe, output_folder: Path, options: TrainOptions | None = None
) -> dict[str, Any]:
    """Train a recipe, save checkpoints, and write the report.

    SIGTERM, SIGINT and SIGUSR1 to any rank, a file `stop` in the folder, and the time limit make
    all ranks save after the same step and return.

    Returns:
        The summary of the whole run, including its parts before a resume, as in `summary.json`.
        `seconds` is wall-clock time without writing the report. `throughput` is the `counted` of
        all ranks (images or word pieces) per second in steps, including tracing and waiting
        for data, excluding evaluation. Bytes are those of one rank. `rows` has the epochs, none
        before the first has ended; times are rank 0's. `snapshots` has the cost of snapshots in
        memory since this process began. `target` has the epoch and time at which the recipe's
        target was reached, `stopped` the position and reason of a stop.

    **Ranks:** all, with the same recipe. **Raises:** ConfigurationError and DataError before the
    first step, and SaveError if another run saves into the folder.
    """
    options, start = options or TrainOptions(), time.monotonic()
    end = None if options.minutes is None else start + 60 * options.minutes
    run = prepare(recipe, output_folder)
    requests = StopRequests(output_folder if run.comm.rank == 0 else None)
    with requests:
        # The same on all ranks, for the first weights; BroadcastState then gives each its own draws
        keras.utils.set_random_seed(recipe.seed)
        model = recipe.build_model(run.objective)
        saved = last_checkpoint(run, options.resume)
        first = first_position(run, saved)
        # Behind the last epoch if only the report is missing
        schemes = recipe.scheme_of_epoch()
        optimizer = compile_model(model, run, schemes[min(first.epoch, recipe.epochs - 1)])
        # Before the training, because its first save would fail if another run saves there
        try:
            claim(run.checkpoint)
        except checkpoint.SaveError:
            # A save claims the folder once it has room
            if not continues_from_memory(run.checkpoint):
                raise
        if saved:
            checkpoint.restore(model, run.checkpoint)
        snapshots = checkpoint.Snapshots(model, run.checkpoint, recipe.checkpoint.memory_every)
        snapshots.load()
        if run.comm.rank == 0:
            # An earlier run's summary, which `tfcommx report` would show as this one's
            with contextlib.suppress(OSError):
                (output_folder / "summary.json").unlink()
        totals = Totals(saved.notes if saved else {}, optimizer, start)
        context = make_context(run, first, saved, options, requests, end, totals, snapshots)
        context.timing.watch(model)
        stopped: dict[str, Any] = {}
        with context.progress:
            try:
                fit_phases(model, context, first)
            except Stopped as stop:
                stopped = {**stop.position._asdict(), "reason": stop.reason}
    run.data.close()
    summary = summarise(run, model, context.rows) | totals.so_far()
    if snapshots.cost.count:
        summary["snapshots"] = snapshots.cost.summary()
    if options.alone:
        summary["alone"] = list(options.alone)
    if target := recipe.target:
        rows = summary["rows"]
        summary["target"] = report.time_to_target(rows, target.score, target.at_least)
    if stopped:
        summary["stopped"] = stopped
        print_stop(run, stopped)
    if cx.is_chief() and summary["rows"]:
        report.write_summary(summary, output_folder)
    return summary


def last_checkpoint(run: Run, resume: bool) -> checkpoint.Head | None:
    """Return the checkpoint to resume; warn if there is none, or if the run will replace one.

    **Raises:** ConfigurationError if the run has no epochs left to train, and has its report.
    """
    # A generation of a supervised run, which resumes even after the last epoch, because the report
    # may be missing
    is_continued = newest_of_run(run.checkpoint) is not None
    resume = resume or is_continued
    saved = checkpoint.last(run.checkpoint)
    if saved and not resume and run.comm.rank == 0:
        log.warning(
            "The first epoch replaces the checkpoint of %d epochs in %s. Stop now and add "
            "--resume to continue it.",
            saved.epoch + 1,
            run.checkpoint,
        )
    if saved is None and resume and run.comm.rank == 0:
        log.warning("--resume finds no checkpoint in %s. The run begins anew.", run.checkpoint)
    is_ended = saved is not None and saved.epoch + 1 >= run.recipe.epochs
    # A run without a report was lost behind its last save
    reports = run.comm.gather_objects((run.folder / "summary.json").exists())
    if saved and resume and not is_continued and is_ended and any(reports):
        raise cx.ConfigurationError(
            f"A resumed run needs epochs left to train. {run.checkpoint} holds {saved.epoch + 1} "
            f"of {run.recipe.epochs}. Add epochs, or see `tfcommx report {run.folder}`."
        )
    if saved and resume and run.comm.rank == 0:
        warn_of_changes(saved.notes.get("settings", {}), settings_of(run.recipe))
    return saved if resume else None


def warn_of_changes(before: dict[str, str], now: dict[str, str]) -> None:
    """Log the settings of a recipe that differ from those until the save.

    Args:
        before: name -> value until the save; empty if the save does not have them.
    """
    changes = [
        f"{name} {before.get(name)} -> {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not name.startswith(UNRELATED)
    ]
    if before and changes:
        log.warning("The run continues with other settings: %s.", ", ".join(changes))


def first_position(run: Run, saved: checkpoint.Head | None) -> Position:
    """Return the first step of a run."""
    if saved is None:
        return Position(0)
    epoch = saved.epoch + 1
    # The recipe has fewer epochs than when it was saved: only the report is left to write
    if epoch >= run.recipe.epochs:
        return Position(epoch)
    # At the same fraction of the epoch, which has another number of steps with another number of
    # ranks or another batch
    step = scaled_steps(saved.step, run, saved)
    # Also if the number of the step is the same, because it follows fewer or more samples
    if saved.step and saved.steps not in (0, run.steps_of(epoch)) and run.comm.rank == 0:
        ranks, batch = run.comm.topology.size, run.recipe.batch(run.recipe.phase_of_epoch()[epoch])
        log.warning(
            "The checkpoint was saved after step %d of %d; with %d ranks and a global batch of %d "
            "the epoch has %d steps, and continues after step %d: some samples come twice in it, "
            "and some not at all.",
            saved.step,
            saved.steps,
            ranks,
            batch * ranks,
            run.steps_of(epoch),
            step,
        )
    return Position(epoch, step)


def scaled_steps(count: int, run: Run, saved: checkpoint.Head) -> int:
    """Convert steps of the interrupted epoch into steps of this run with about as many samples."""
    steps = run.steps_of(saved.epoch + 1)
    return count if saved.steps in (0, steps) else count * steps // saved.steps


def print_stop(run: Run, stopped: dict[str, Any]) -> None:
    """Print on rank 0 the position of the stop, and the position from which --resume continues."""
    if run.comm.rank:
        return
    stop, head = Position(stopped["epoch"], stopped["step"]), read_own_head(run.checkpoint)
    saved = Position(0) if head is None else Position(head.epoch + 1, head.step)
    # A run that has diverged keeps the save before; one without room may have none of its end
    result = "and saved. Add --resume to continue."
    if saved != stop:
        result = f"which was not saved. --resume continues {_words(run, saved)}."
    with contextlib.suppress(OSError):  # Such as a full disk, in front of the report
        print(f"Stopped by {stopped['reason']}, {_words(run, stop)}, {result}", flush=True)


def _words(run: Run, position: Position) -> str:
    """Return a position in words, with the step and the epoch from 1."""
    epoch, epochs = position.epoch + 1, run.recipe.epochs
    if epoch > epochs:
        return "after the last epoch"
    steps = run.steps_of(position.epoch)
    return f"before step {position.step + 1} of {steps} of epoch {epoch}/{epochs}"


def compile_model(model: keras.Model, run: Run, scheme: cx.Scheme) -> keras.optimizers.Optimizer:
    """Compile the model with the recipe's optimizer, wrapped; return the wrapper."""
    optimizer = cx.DistributedOptimizer(
        run.recipe.optimizer.build(),
        scheme=scheme,
        links=run.recipe.links,
        strategy=run.recipe.strategy.build(),
    )
    model.compile(
        optimizer,
        loss=run.objective.loss(),
        metrics=list(run.objective.metrics()),
        jit_compile=False,  # XLA cannot compile Horovod's collectives
    )
    return optimizer


def make_context(
    run: Run,
    first: Position,
    saved: checkpoint.Head | None,
    options: TrainOptions,
    requests: StopRequests,
    end: float | None,
    totals: Totals,
    snapshots: checkpoint.Snapshots,
) -> RunContext:
    """Make the state that the callbacks share; the run begins, or resumes `saved`, at `first`."""
    steps = run.steps_before(Position(run.recipe.epochs)) - run.steps_before(first)
    progress = report.ProgressDisplay(
        steps, run.recipe.epochs, shown=cx.is_chief(), terminal=options.terminal
    )
    events = report.TensorBoardEvents(run.folder / "tensorboard") if cx.is_chief() else None
    context = RunContext(run, requests, end, totals, snapshots, progress, events)
    notes = saved.notes if saved else {}
    context.rows += map(report.with_nan, notes.get("rows", ()))
    if saved and saved.step:
        under_way = notes.get("under_way", {})
        counts = (under_way.get(name, 0) for name in ("steps", "first_steps"))
        measured, first_steps = (scaled_steps(count, run, saved) for count in counts)
        context.counter.continue_from(measured)
        context.timing.continue_from(under_way.get("seconds", {}), first_steps)
    return context


def make_callbacks(
    context: RunContext, first: Position, evaluation: Evaluation
) -> list[keras.callbacks.Callback]:
    """Return the callbacks of a run, in the order in which Keras calls them."""
    schemes = enumerate(pairwise(context.run.recipe.scheme_of_epoch()), 1)
    # The optimizer was compiled with the scheme of the first epoch
    changes = {at: new for at, (old, new) in schemes if new != old and at > first.epoch}
    saving = SaveAndStop(context)
    return [
        # First; the others read them
        context.counter,
        context.timing,
        SetLearningRate(context),
        InformAuto(context),
        callbacks.SwitchScheme(changes),
        callbacks.ChooseAgain(),
        # Before the callbacks that need whole and equal weights
        Consolidate(),
        callbacks.AverageMetrics(),
        callbacks.AverageBatchNorm(),
        context.compare,
        evaluation,
        # After the callbacks whose logs it reads
        EpochHistory(context),
        saving,
        ShowProgress(context),
        # Last, because it raises an exception, and the others must see the end of the epoch
        StopAtEpochEnd(saving),
    ]


def fit_phases(model: keras.Model, context: RunContext, first: Position) -> None:
    """Train the phases one after the other, from `first` on. **Raises:** Stopped."""
    run, evaluation = context.run, Evaluation(context)
    run_callbacks = make_callbacks(context, first, evaluation)
    begin: list[keras.callbacks.Callback] = [callbacks.BroadcastState()]
    if first.step:  # Resumed within an epoch, so its metrics so far are restored
        begin.append(checkpoint.RestoreRankValues(run.checkpoint))
    phase = None
    for call in fit_calls(run.phases, first, run.data.redistributes):
        if call.phase != phase:
            phase = call.phase
            evaluation.start_phase(model, run.recipe.phases[phase])
            # Without this, a second resolution would get a graph of dynamic shapes, because Keras
            # reduces retracing. Its sums differ in the last bits from those of a run resumed here.
            model.make_train_function(force=True)
        if run.data.redistributes and call.epochs.start > first.epoch:
            run.data.redistribute(call.epochs.start, run.comm)
        context.counter.begin(call, run.steps[phase])
        batches = run.batches(call)
        if call.step:
            # As the first step would, so that RestoreRankValues can set their sums
            build_metrics(model, batches.element_spec)
        model.fit(
            batches,
            initial_epoch=call.epochs.start,
            epochs=call.epochs.stop,
            steps_per_epoch=run.steps[phase] - call.step,
            verbose=0,
            shuffle=False,
            callbacks=[*begin, *run_callbacks],
        )
        begin = []


def summarise(run: Run, model: keras.Model, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run from its rows, without traffic and time."""
    busy = sum(row["seconds"].get(kind, 0) for row in rows for kind in STEP_KINDS)
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
