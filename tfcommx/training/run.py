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
    # Steps of an epoch, >= 1, the same on every rank
    steps: int

    @property
    def global_batch(self) -> int:
        """Samples a step over all ranks."""
        return self.recipe.batch_per_rank * self.comm.topology.size

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
    first = recipe.data.serving(recipe.batch_per_rank, recipe.phases[0].resolution)
    steps = cache.steps(first)
    if not steps:
        raise cx.PlanError(
            f"A step needs batch_per_rank * ranks <= {samples.train.count} samples. Received "
            f"{recipe.batch_per_rank} * {comm.topology.size}. Lower batch_per_rank."
        )
    return Run(recipe, folder, comm, samples, recipe.task.build(samples), cache, steps)


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
