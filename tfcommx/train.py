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
from tfcommx.data import augment as serving
from tfcommx.data import fashion_mnist, images
from tfcommx.data.arrays import Arrays
from tfcommx.data.cache import DataCache, Options
from tfcommx.models import small_cnn
from tfcommx.optim import callbacks, checkpoint
from tfcommx.recipe import Recipe

log = logging.getLogger("tfcommx")

EVALUATION_BATCH = 500  # images; large enough to be fast, small enough to stay in the cache


class Timing(keras.callbacks.Callback):
    """Measures where an epoch's seconds go on this rank.

    - `data`: from the start of a step until its batch has arrived, read inside the step by
      `tf.timestamp`.
    - `step`: from then until the step has ended: forward, backward, exchange (with the wait for
      slower ranks) and update. They overlap, so they are one number.
    - `first_step`: the whole first step of a phase, in which TensorFlow traces and compiles the
      step.
    - `evaluation`: measured by Evaluation.
    - `other`: the rest of the epoch: averaging, comparing, reporting.
    """

    def __init__(self) -> None:
        super().__init__()
        # seconds since 1970 when the batch was there
        self.arrived = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self.seconds: dict[str, float] = {}
        self.epoch_start = 0.0

    def watch(self, model: keras.Model) -> None:
        """Make the model's training step record when its batch has arrived."""
        train_step = model.train_step

        def timed(data: Any) -> Any:
            with tf.control_dependencies(tf.nest.flatten(data)):
                noted = self.arrived.assign(tf.timestamp())
            with tf.control_dependencies([noted]):
                return train_step(data)

        model.train_step = timed

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.first = True

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.seconds = {"data": 0.0, "step": 0.0, "first_step": 0.0, "evaluation": 0.0}
        self.epoch_start = time.time()

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self.batch_start = time.time()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        now, arrived = time.time(), float(self.arrived.numpy())
        if self.first:
            self.seconds["first_step"] += now - self.batch_start
        else:
            self.seconds["data"] += arrived - self.batch_start
            self.seconds["step"] += now - arrived
        self.first = False

    def finish(self) -> dict[str, float]:
        """Return the epoch's seconds by kind; they sum to the epoch's wall-clock time."""
        total = time.time() - self.epoch_start
        return {**self.seconds, "other": total - sum(self.seconds.values())}


class LearningRate(keras.callbacks.Callback):
    """Sets the learning rate of every step from the recipe.

    A callback and not a Keras schedule, so that the saved optimizer needs nothing of ours to be
    loaded.
    """

    def __init__(self, recipe: Recipe, steps_per_epoch: int, global_batch: int) -> None:
        super().__init__()
        self.rate = recipe.learning_rate
        self.sizes = (steps_per_epoch, steps_per_epoch * recipe.epochs, global_batch)
        self.before = 0  # steps before this epoch

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.before = epoch * self.sizes[0]

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self.model.optimizer.learning_rate = self.rate.at(self.before + batch, *self.sizes)


class Evaluation(keras.callbacks.Callback):
    """At each epoch's end counts the test images that the model gets right, at the phase's
    resolution.

    Every rank takes its own part of the test set; the counts are summed exactly. **Ranks:** all.
    """

    def __init__(self, comm: Any, test_x: np.ndarray, test_y: np.ndarray, timing: Timing) -> None:
        super().__init__()
        self.comm, self.timing = comm, timing
        part = slice(comm.rank, None, comm.topology.size)
        self.test = tf.data.Dataset.from_tensor_slices((test_x[part], test_y[part])).batch(
            EVALUATION_BATCH
        )
        self.resolution = test_x.shape[1]

    def at(self, resolution: int) -> None:
        """Evaluate at this resolution from now on."""
        self.resolution = resolution
        self.count = tf.function(self._count)  # the new resolution is traced into it

    def _count(self, pictures: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        logits = self.model(images.resize(pictures, self.resolution), training=False)
        return tf.math.count_nonzero(tf.argmax(logits, axis=1) == tf.cast(labels, tf.int64))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        start = time.time()
        mine = [(int(self.count(pictures, labels)), len(labels)) for pictures, labels in self.test]
        right, seen = np.sum(self.comm.gather_objects(np.sum(mine, axis=0)), axis=0)
        if logs is not None:
            logs["test_accuracy"] = float(right / seen)
        self.timing.seconds["evaluation"] += time.time() - start


class Rows(keras.callbacks.Callback):
    """Keeps one row of numbers per epoch, and shows it on rank 0. Comes last: it reads what the
    others put into the logs.
    """

    def __init__(
        self,
        recipe: Recipe,
        timing: Timing,
        compare: Any,
        cache: DataCache,
        images_per_epoch: int,
        progress: report.Progress,
    ) -> None:
        super().__init__()
        self.phases, self.schemes, self.timing, self.compare = (
            recipe.phase_of_epoch(),
            recipe.scheme_of_epoch(),
            timing,
            compare,
        )
        self.cache = cache
        self.images, self.progress = images_per_epoch, progress
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.progress.step()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        logs, phase, scheme = logs or {}, self.phases[epoch], self.schemes[epoch]
        seconds = self.timing.finish()
        busy = seconds["data"] + seconds["step"] + seconds["first_step"]
        self.rows.append(
            {
                "epoch": epoch + 1,
                "resolution": phase.resolution,
                "route": scheme.route,
                "selection": scheme.selection,
                "density": scheme.density,
                "loss": float(logs["loss"]),
                "train_accuracy": float(logs["accuracy"]),
                "test_accuracy": logs["test_accuracy"],
                "images_per_second": self.images / busy,
                "replicas_identical": bool(self.compare.identical),
                "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
                "loader": {
                    name: round(value, 6) for name, value in self.cache.report(epoch).items()
                },
            }
        )
        self.progress.epoch(self.rows[-1])


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
        comm.topology,
        comm.rank,
        Options(
            seed=recipe.seed,
            memory=str(recipe.data.memory),
            partial=True,
            exchange=recipe.data.exchange,
            # partial: what finds no room is at hand in the arrays
            threads=recipe.threads,
        ),
    )
    steps = cache.steps(serving.Phase(recipe.batch_per_rank))
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
    rows = Rows(recipe, timing, compare, cache, steps * global_batch, progress)
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
            served = serving.Phase(
                recipe.batch_per_rank, phase.resolution, flip=recipe.data.flip, std=(1 / 255,)
            )
            shift = round(recipe.data.shift * phase.resolution / train_x.shape[1])
            evaluation.at(phase.resolution)
            for piece in served_in_one_go(epochs, recipe.data.exchange):
                if piece.start > first:
                    cache.swap(comm, piece.start)
                batches = images.training_batches(cache, served, piece, classes, shift)
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


def served_in_one_go(epochs: range, exchange: float) -> list[range]:
    """Cut epochs where parts are exchanged: nothing may read ahead into the next epoch then."""
    return [range(epoch, epoch + 1) for epoch in epochs] if exchange else [epochs]


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
