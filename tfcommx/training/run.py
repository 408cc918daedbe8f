"""A run: a recipe made ready on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

import tfcommx as cx
from tfcommx.comm.base import Comm
from tfcommx.data.cache.cache import DataCache
from tfcommx.recipes.base import Objective, Samples
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.position import Piece, Position


@dataclass(frozen=True)
class Run:
    """A recipe made ready on this rank: its samples are there, the ranks know each other."""

    recipe: Recipe
    # Where checkpoint and report go
    folder: Path
    comm: Comm
    samples: Samples
    objective: Objective
    # Serves the training samples
    cache: DataCache
    # Steps of an epoch of each phase, >= 1, the same on every rank
    steps: tuple[int, ...]

    @property
    def phases(self) -> list[int]:
        """Epochs of each phase."""
        return [phase.epochs for phase in self.recipe.phases]

    def global_batch(self, phase: int) -> int:
        """Return the samples a step over all ranks."""
        return batch_of(self.recipe, phase) * self.comm.topology.size

    def steps_of(self, epoch: int) -> int:
        """Return the steps of an epoch."""
        return self.steps_before(Position(epoch + 1)) - self.steps_before(Position(epoch))

    def steps_before(self, position: Position) -> int:
        """Return the steps of the whole run before a position."""
        ended = [
            steps
            for steps, epochs in zip(self.steps, self.phases, strict=True)
            for _ in range(epochs)
        ]
        return sum(ended[: position.epoch]) + position.step

    def batches(self, piece: Piece) -> tf.data.Dataset:
        """Return this rank's training batches of a piece: (inputs, targets) for every step."""
        return self.objective.targets(self.samples_of(piece))

    def samples_of(self, piece: Piece) -> tf.data.Dataset:
        """Return this rank's training batches of a piece: (inputs, labels) for every step."""
        data, recipe = self.recipe.data, self.recipe
        resolution = recipe.phases[piece.phase].resolution
        serving = data.serving(batch_of(recipe, piece.phase), resolution)
        return data.batches(self.cache, serving, piece.epochs).skip(piece.step)

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder / "checkpoint"


def prepare(recipe: Recipe, folder: Path) -> Run:
    """Start Horovod, read the samples and open the data cache.

    Args:
        recipe: what to train.
        folder: where checkpoint and report go.

    Returns:
        The run.

    **Ranks:** all, with the same recipe.
    **Raises:** DataError for samples that are missing, PlanError if there are too few for a step.
    """
    if recipe.threads:
        # Must be set before TensorFlow runs anything
        tf.config.threading.set_intra_op_parallelism_threads(recipe.threads)
        tf.config.threading.set_inter_op_parallelism_threads(recipe.threads)
    comm = cx.init(node_size=recipe.node_size)
    samples = recipe.data.build()
    cache = open_cache(recipe, comm, samples)
    steps = tuple(
        cache.steps(recipe.data.serving(batch_of(recipe, number), phase.resolution))
        for number, phase in enumerate(recipe.phases)
    )
    for number, count in enumerate(steps):
        if not count:
            raise cx.PlanError(
                f"A step needs batch_per_rank * ranks <= {samples.train.count} samples. Received "
                f"{batch_of(recipe, number)} * {comm.topology.size}. Lower batch_per_rank."
            )
    return Run(recipe, folder, comm, samples, recipe.task.build(samples), cache, steps)


def batch_of(recipe: Recipe, phase: int) -> int:
    """Return the samples a step of a phase on one rank: its own, or the recipe's."""
    return getattr(recipe.phases[phase], "batch", None) or recipe.batch_per_rank


def open_cache(recipe: Recipe, comm: Comm, samples: Samples) -> DataCache:
    """Open the cache that serves the training samples to this rank."""
    return DataCache(
        samples.train,
        topology=comm.topology,
        rank=comm.rank,
        seed=recipe.seed,
        memory=recipe.data.memory,
        # Samples that find no room in memory can still be read from the source
        partial=True,
        reshuffle_fraction=recipe.data.reshuffle_fraction,
        threads=recipe.threads,
    )
