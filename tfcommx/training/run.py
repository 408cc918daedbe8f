"""A run: a recipe made ready on this rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

import tfcommx as cx
from tfcommx.comm.base import Comm
from tfcommx.recipes.base import Data, Objective, Place
from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.target import Target
from tfcommx.training.position import Piece, Position


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
    # Steps of an epoch of each phase, >= 1, the same on every rank
    steps: tuple[int, ...]

    @property
    def phases(self) -> list[int]:
        """Epochs of each phase."""
        return [phase.epochs for phase in self.recipe.phases]

    def global_batch(self, phase: int) -> int:
        """Return the samples a step over all ranks."""
        return self.recipe.batch(self.recipe.phases[phase]) * self.comm.topology.size

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

    def steps_with_scheme(self, piece: Piece) -> int:
        """Return the steps from a piece's first to the next phase with another scheme."""
        following = self.recipe.phases[piece.phase :]
        same = itertools.takewhile(lambda one: one.scheme == following[0].scheme, following)
        end = sum(self.phases[: piece.phase]) + sum(phase.epochs for phase in same)
        begin = Position(piece.epochs.start, piece.step)
        return self.steps_before(Position(end)) - self.steps_before(begin)

    def batches(self, piece: Piece) -> tf.data.Dataset:
        """Return this rank's training batches of a piece: what `fit` takes in every step."""
        return self.objective.targets(self.samples_of(piece))

    def samples_of(self, piece: Piece) -> tf.data.Dataset:
        """Return this rank's training batches of a piece: (inputs, labels) for every step."""
        phase = self.recipe.phases[piece.phase]
        batch = self.recipe.batch(phase)
        return self.data.train(batch, phase.resolution, piece.epochs, piece.step)

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
    **Raises:** DataError for samples that are missing, PlanError if there are too few for a step,
    or if the target is no score of the task.
    """
    if recipe.threads:
        # Must be set before TensorFlow runs anything
        tf.config.threading.set_intra_op_parallelism_threads(recipe.threads)
        tf.config.threading.set_inter_op_parallelism_threads(recipe.threads)
    comm = cx.init(node_size=recipe.node_size)
    place = Place(comm.topology, comm.rank, recipe.seed, recipe.threads)
    data = recipe.data.build(place)
    batches = [recipe.batch(phase) for phase in recipe.phases]
    steps = tuple(
        data.steps(batch, phase.resolution)
        for batch, phase in zip(batches, recipe.phases, strict=True)
    )
    for number, count in enumerate(steps):
        if not count:
            raise cx.PlanError(
                f"A step needs batch * ranks <= {data.count} samples. phases[{number}] has "
                f"{batches[number]} * {comm.topology.size}. Lower its batch, or batch_per_rank."
            )
    objective = recipe.task.build(data)
    if recipe.target:
        check_target(recipe.target, objective)
    return Run(recipe, folder, comm, data, objective, steps)


def check_target(target: Target, objective: Objective) -> None:
    """Check that the evaluation finds the target's score. **Raises:** PlanError."""
    known = [score.removeprefix("test_") for score in objective.scores]
    if target.score not in known:
        raise cx.PlanError(
            f"A target needs a score of the task: {', '.join(known)}. Received {target.score!r}. "
            "Change target.score."
        )
