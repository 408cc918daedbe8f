"""Carry out a recipe: train on all ranks, evaluate on all ranks, return a summary."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx
from tfcommx import report
from tfcommx.data.cache.batch_spec import BatchSpec
from tfcommx.data.cache.cache import DataCache
from tfcommx.data.sources.arrays import Arrays
from tfcommx.optim import callbacks, checkpoint
from tfcommx.recipes.datasets import fashion_mnist
from tfcommx.recipes.datasets.shift import training_batches
from tfcommx.recipes.models.small_cnn import small_cnn
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.evaluation import Evaluation
from tfcommx.training.history import EpochHistory
from tfcommx.training.learning_rate import LearningRate
from tfcommx.training.timing import Timing

log = logging.getLogger("tfcommx")


def train(
    recipe: Recipe, output_folder: Path, resume: bool = False, terminal: str | None = None
) -> dict[str, Any]:
    """Train as the recipe says; write a checkpoint after every epoch and, at the end, the report
    into `output_folder`.

    Args:
        resume: continue after the last whole checkpoint in `output_folder`, if there is one, with
            its residuals. The summary then covers the epochs since.
        terminal: device file of a terminal for the progress bar, where rank 0's own output is a
            pipe.

    Returns: the summary, as in `summary.json`. `seconds` is the wall-clock time of this call, all
        but the report's files; `images_per_second` counts training images of all ranks over the
        time in steps, tracing and waiting for data included, evaluation not; bytes are per rank,
        the whole run; `rows` has the epochs. Times are this rank's own.

    **Ranks:** all, with the same recipe. **Raises:** PlanError and DataError before the first step.
    """
    start = time.time()
    if recipe.threads:  # must be said before TensorFlow runs anything
        tf.config.threading.set_intra_op_parallelism_threads(recipe.threads)
        tf.config.threading.set_inter_op_parallelism_threads(recipe.threads)
    comm = cx.init(node_size=recipe.node_size)
    ranks = comm.topology.size
    train_x, train_y, test_x, test_y = fashion_mnist.load(fashion_mnist.fetch(recipe.data.folder))
    classes = len(fashion_mnist.CLASSES)
    global_batch = recipe.batch_per_rank * ranks
    cache = DataCache(
        Arrays(train_x, train_y, fashion_mnist.CLASSES, recipe.data.set),
        seed=recipe.seed,
        memory=str(recipe.data.memory),
        # What finds no room is at hand in the arrays.
        partial=True,
        reshuffle_fraction=recipe.data.reshuffle_fraction,
        threads=recipe.threads,
    )
    steps = cache.steps(BatchSpec(recipe.batch_per_rank))
    if not steps:
        raise cx.PlanError(
            f"A step needs batch_per_rank * ranks <= {len(train_x)} images. Received "
            f"{recipe.batch_per_rank} "
            f"* {ranks}. Lower batch_per_rank."
        )

    keras.utils.set_random_seed(recipe.seed)
    model = small_cnn(recipe.model.filters, recipe.model.residual, classes)
    saved = output_folder / "checkpoint"
    held = checkpoint.next_epoch(saved)
    if held and not resume and comm.rank == 0:
        log.warning(
            "The first epoch replaces the checkpoint of %d epochs in %s. Stop now and add "
            "--resume to continue it.",
            held,
            saved,
        )
    first = held if resume else 0
    if first >= recipe.epochs:
        raise cx.PlanError(
            f"A resumed run needs epochs left to train. {saved} holds {first} of {recipe.epochs}."
        )
    schemes = recipe.scheme_of_epoch()
    optimizer = compiled(model, recipe, schemes[first])
    if resume:
        checkpoint.restore(model, saved)

    timing, compare = Timing(), callbacks.CompareReplicas()
    timing.watch(model)
    evaluation = Evaluation(comm, test_x, test_y, timing)
    progress = report.Progress(
        steps * (recipe.epochs - first), recipe.epochs, shown=cx.is_chief(), terminal=terminal
    )
    rows = EpochHistory(recipe, timing, compare, cache, steps * global_batch, progress)
    first_epochs = np.cumsum([0, *(phase.epochs for phase in recipe.phases)])
    later = range(first + 1, recipe.epochs)
    switch = callbacks.SwitchScheme(
        {epoch: schemes[epoch] for epoch in later if schemes[epoch] != schemes[epoch - 1]}
    )
    every_phase = [
        timing,
        LearningRate(recipe, steps, global_batch),
        switch,
        callbacks.AverageMetrics(),
        callbacks.AverageBatchNorm(),
        compare,
        evaluation,
        checkpoint.Checkpoint(saved),
        rows,
    ]
    begin = [callbacks.BroadcastState()]
    if comm.rank == 0:
        # of a run before: `tfcommx report` would show it for this one
        with contextlib.suppress(OSError):
            (output_folder / "summary.json").unlink()

    with progress:
        for number, phase in enumerate(recipe.phases):
            epochs = range(max(first, int(first_epochs[number])), int(first_epochs[number + 1]))
            if not epochs:
                continue
            # 0 to 255
            served = BatchSpec(
                recipe.batch_per_rank, phase.resolution, flip=recipe.data.flip, std=(1 / 255,)
            )
            shift = round(recipe.data.shift * phase.resolution / train_x.shape[1])
            evaluation.at(phase.resolution)
            for piece in served_in_one_go(epochs, recipe.data.reshuffle_fraction):
                if piece.start > first:
                    cache.reshuffle(piece.start)
                batches = training_batches(cache, served, piece, classes, shift)
                model.fit(
                    batches,
                    initial_epoch=piece.start,
                    epochs=piece.stop,
                    steps_per_epoch=steps,
                    verbose=0,
                    shuffle=False,
                    callbacks=[*begin, *every_phase],
                )
                begin = []

    cache.close()
    busy = sum(row["seconds"][kind] for row in rows.rows for kind in ("data", "step", "first_step"))
    summary = {
        "name": recipe.name,
        "test_accuracy": rows.rows[-1]["test_accuracy"],
        "ranks": ranks,
        "nodes": comm.topology.nodes,
        "epochs": recipe.epochs,
        "parameters": model.count_params(),
        "seconds": round(time.time() - start, 1),
        "images_per_second": round(steps * global_batch * len(rows.rows) / busy, 1),
        **{key: round(value) for key, value in optimizer.exchanger.traffic().items()},
        "replicas_identical": all(row["replicas_identical"] for row in rows.rows),
        "rows": rows.rows,
    }
    if cx.is_chief():
        report.write(summary, output_folder)
    return summary


def served_in_one_go(epochs: range, reshuffle_fraction: float) -> list[range]:
    """Cut epochs if samples are reshuffled: nothing may read ahead into the next epoch then."""
    if not reshuffle_fraction:
        return [epochs]
    return [range(epoch, epoch + 1) for epoch in epochs]


def compiled(model: keras.Model, recipe: Recipe, scheme: cx.Scheme) -> keras.optimizers.Optimizer:
    """Compile the model with the recipe's optimizer, made distributed; return the optimizer."""
    chosen = recipe.optimizer
    optimizer = cx.DistributedOptimizer(
        keras.optimizers.SGD(
            0.0,
            momentum=chosen.momentum,
            nesterov=chosen.nesterov,
            weight_decay=chosen.weight_decay or None,
        ),
        scheme=scheme,
        links=recipe.links,
    )
    # Decay pulls weights to zero; scales, offsets and biases have no reason to be small.
    optimizer.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])
    loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=recipe.label_smoothing
    )
    model.compile(optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    return optimizer
