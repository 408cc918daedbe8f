"""Carry out a recipe: train on all ranks, evaluate on all ranks, return a summary."""

from __future__ import annotations

import contextlib
import logging
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

import tfcommx as cx
from tfcommx import report
from tfcommx.optim import callbacks, checkpoint
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.evaluation import Evaluation
from tfcommx.training.history import EpochHistory
from tfcommx.training.learning_rate import LearningRate
from tfcommx.training.run import Run, prepare
from tfcommx.training.timing import Timing

log = logging.getLogger("tfcommx")


def train(
    recipe: Recipe, output_folder: Path, resume: bool = False, terminal: str | None = None
) -> dict[str, Any]:
    """Train as the recipe says; write a checkpoint after every epoch and the report at the end.

    Args:
        recipe: what to train.
        output_folder: where checkpoint and report go.
        resume: continue after the last whole checkpoint in `output_folder`, if there is one, with
            its residuals. The summary then covers the epochs since.
        terminal: device file of a terminal for the progress bar, if rank 0's own output is a pipe.

    Returns:
        The summary, as in `summary.json`. `seconds` is the wall-clock time of this call, except
        for the report's files; `images_per_second` counts training images of all ranks over the
        time in steps, tracing and waiting for data included, evaluation not; bytes are per rank,
        the whole run; `rows` has the epochs. Times are this rank's own.

    **Ranks:** all, with the same recipe. **Raises:** PlanError and DataError before the first step.
    """
    start = time.time()
    run = prepare(recipe, output_folder)
    keras.utils.set_random_seed(recipe.seed)
    model = recipe.build_model(run.objective)
    first = first_epoch(run, resume)
    optimizer = compile_model(model, run, recipe.scheme_of_epoch()[first])
    if resume:
        checkpoint.restore(model, run.checkpoint)
    if run.comm.rank == 0:
        # Of an earlier run: `tfcommx report` would take it for the report of this one
        with contextlib.suppress(OSError):
            (output_folder / "summary.json").unlink()
    run_callbacks = make_callbacks(run, first, terminal)
    run_callbacks.timing.watch(model)
    with run_callbacks.history.progress:
        fit_phases(model, run, first, run_callbacks)
    run.data.close()
    summary = summarise(run, model, run_callbacks.history.rows)
    summary |= {key: round(value) for key, value in optimizer.exchanger.traffic().items()}
    summary["seconds"] = round(time.time() - start, 1)
    if cx.is_chief():
        report.write(summary, output_folder)
    return summary


def first_epoch(run: Run, resume: bool) -> int:
    """Return the epoch to begin with.

    It warns first if the run will replace a checkpoint.

    **Raises:** PlanError if a resumed run has no epochs left to train.
    """
    saved = checkpoint.next_epoch(run.checkpoint)
    if saved and not resume and run.comm.rank == 0:
        log.warning(
            "The first epoch replaces the checkpoint of %d epochs in %s. Stop now and add "
            "--resume to continue it.",
            saved,
            run.checkpoint,
        )
    first = saved if resume else 0
    if first >= run.recipe.epochs:
        raise cx.PlanError(
            f"A resumed run needs epochs left to train. {run.checkpoint} holds {first} of "
            f"{run.recipe.epochs}."
        )
    return first


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

    timing: Timing
    learning_rate: LearningRate
    switch: callbacks.SwitchScheme
    metrics: callbacks.AverageMetrics
    batch_norm: callbacks.AverageBatchNorm
    compare: callbacks.CompareReplicas
    evaluation: Evaluation
    checkpoint: checkpoint.Checkpoint
    # Last: it reads what the others put into the logs
    history: EpochHistory


def make_callbacks(run: Run, first: int, terminal: str | None) -> RunCallbacks:
    """Make the callbacks of a run that begins with the epoch `first`."""
    recipe, timing, compare = run.recipe, Timing(), callbacks.CompareReplicas()
    schemes = pairwise(recipe.scheme_of_epoch())
    changes = {epoch: new for epoch, (old, new) in enumerate(schemes, 1) if new != old}
    steps = [run.steps(phase) for phase in recipe.phase_of_epoch()]
    progress = report.Progress(
        sum(steps[first:]), recipe.epochs, shown=cx.is_chief(), terminal=terminal
    )
    return RunCallbacks(
        timing,
        LearningRate(recipe, steps, run.comm.topology.size),
        callbacks.SwitchScheme({epoch: new for epoch, new in changes.items() if epoch > first}),
        callbacks.AverageMetrics(),
        callbacks.AverageBatchNorm(),
        compare,
        Evaluation(run, timing),
        checkpoint.Checkpoint(run.checkpoint),
        EpochHistory(run, timing, compare, progress),
    )


def fit_phases(model: keras.Model, run: Run, first: int, run_callbacks: RunCallbacks) -> None:
    """Train the phases one after the other, from the epoch `first` on."""
    data = run.data
    begin: list[keras.callbacks.Callback] = [callbacks.BroadcastState()]
    ends = np.cumsum([phase.epochs for phase in run.recipe.phases])
    for phase, end in zip(run.recipe.phases, map(int, ends), strict=True):
        epochs = range(max(first, end - phase.epochs), end)
        batch = run.recipe.batch(phase)
        run_callbacks.evaluation.at(model, phase)
        for piece in served_in_one_go(epochs, data.redistributes):
            if piece.start > first:
                data.redistribute(piece.start, run.comm)
            model.fit(
                run.objective.targets(data.train(batch, phase.resolution, piece)),
                initial_epoch=piece.start,
                epochs=piece.stop,
                steps_per_epoch=run.steps(phase),
                verbose=0,
                shuffle=False,
                callbacks=[*begin, *run_callbacks],
            )
            begin = []


def served_in_one_go(epochs: range, redistributes: bool) -> list[range]:
    """Cut epochs if samples are redistributed between them: nothing may read ahead then."""
    if not epochs:
        return []
    return [range(epoch, epoch + 1) for epoch in epochs] if redistributes else [epochs]


def summarise(run: Run, model: keras.Model, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a run from the rows of its epochs, without its traffic and its time."""
    busy = sum(row["seconds"][kind] for row in rows for kind in ("data", "step", "first_step"))
    phases = run.recipe.phase_of_epoch()[run.recipe.epochs - len(rows) :]
    images = sum(run.steps(phase) * run.global_batch(phase) for phase in phases)
    scores = {name: value for name, value in rows[-1].items() if name.startswith("test_")}
    return {
        "name": run.recipe.name,
        **scores,
        "ranks": run.comm.topology.size,
        "nodes": run.comm.topology.nodes,
        "epochs": run.recipe.epochs,
        "parameters": model.count_params(),
        "images_per_second": round(images / busy, 1),
        "replicas_identical": all(row["replicas_identical"] for row in rows),
        "rows": rows,
    }
