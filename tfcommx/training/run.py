"""A run: a recipe made ready on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

import tfcommx as cx
from tfcommx.comm.base import Comm
from tfcommx.recipes.base import Data, Objective, Place
from tfcommx.recipes.recipe import Phase, Recipe


@dataclass(frozen=True)
class Run:
    """A recipe made ready on this rank: its samples are there, the ranks know each other."""

    recipe: Recipe
    # Where checkpoint and report go
    folder: Path
    comm: Comm
    # Serves training and test samples
    data: Data
    objective: Objective

    def steps(self, phase: Phase) -> int:
        """Return the steps of an epoch of a phase, >= 1, the same on every rank."""
        return self.data.steps(self.recipe.batch(phase), phase.resolution)

    def global_batch(self, phase: Phase) -> int:
        """Return the samples a step over all ranks."""
        return self.recipe.batch(phase) * self.comm.topology.size

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
    place = Place(comm.topology, comm.rank, recipe.seed, recipe.threads)
    data = recipe.data.build(place)
    run = Run(recipe, folder, comm, data, recipe.task.build(data))
    for number, phase in enumerate(recipe.phases):
        if not run.steps(phase):
            raise cx.PlanError(
                f"A step needs batch * ranks <= {data.count} samples. phases[{number}] has "
                f"{recipe.batch(phase)} * {comm.topology.size}. Lower its batch, or batch_per_rank."
            )
    return run
