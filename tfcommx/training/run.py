"""A run: a recipe with its data, its task and the other ranks, ready to train."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from pydantic import BaseModel

import tfcommx as cx
from tfcommx.checkpoint.files import why_not_writable
from tfcommx.checkpoint.newest import continues_from_memory
from tfcommx.checkpoint.saving import RETRY
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.comparisons import Facts
from tfcommx.core import log
from tfcommx.optim.automatic import ExpectedRun
from tfcommx.recipes.families import Data, DataRank, Objective
from tfcommx.recipes.recipe import Recipe, Target
from tfcommx.training.steps import FitCall, Position

# Types of the settings that are compared between ranks
SIMPLE = (str, int, float, tuple, list, dict, cx.Scheme, type(None))
# Folder of the checkpoints in that of the run
CHECKPOINT = "checkpoint"
SAME_RECIPE = "Start all ranks with the same file and the same settings."
SAME_DATA = "Copy the same files to every node, or read one copy that all nodes see."


@dataclass(frozen=True)
class Run:
    """A recipe that is ready to train on this rank."""

    recipe: Recipe
    # Folder of checkpoint and report
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
        """Return the samples per step over all ranks."""
        return self.recipe.batch(self.recipe.phases[phase]) * self.comm.topology.size

    def steps_of(self, epoch: int) -> int:
        return self.steps_before(Position(epoch + 1)) - self.steps_before(Position(epoch))

    def steps_before(self, position: Position) -> int:
        """Return the steps of the whole run before a position."""
        counts = np.repeat(self.steps, self.phases)
        return int(counts[: position.epoch].sum()) + position.step

    def expected_run(self, epoch: int, accumulated: int = 1) -> ExpectedRun:
        """Return the run of steps that share the scheme of an epoch, for "auto".

        Args:
            epoch: in [0, epochs of the run).
            accumulated: steps per update of the weights, >= 1.
        """
        schemes, phases = self.recipe.scheme_of_epoch(), self.recipe.phase_of_epoch()
        # From the first of these epochs, so that a resumed run finds or makes the same choice
        first = end = epoch
        while first and schemes[first - 1] == schemes[epoch]:
            first -= 1
        while end < len(schemes) and schemes[end] == schemes[epoch]:
            end += 1
        batch, epoch_batch = (self.recipe.batch(phases[number]) for number in (first, epoch))
        return ExpectedRun(
            sum(map(self.steps_of, range(first, end))) // accumulated,
            self.steps_of(first),
            batch,
            whole_run=True,
            # A choice measured with another batch than the first epoch's would mislead other runs
            keeps_choice=batch == epoch_batch,
        )

    def batches(self, call: FitCall) -> tf.data.Dataset:
        """Return the batches of this rank for a call of `fit`."""
        # Prepares one batch during each step; tf.data adds no such stage (`data.pipeline`)
        return self.objective.targets(self.samples_of(call)).prefetch(1)

    def samples_of(self, call: FitCall) -> tf.data.Dataset:
        """Return this rank's batches (inputs, labels) for a call of `fit`, without targets."""
        phase = self.recipe.phases[call.phase]
        batch = self.recipe.batch(phase)
        return self.data.train(batch, phase.resolution, call.epochs, call.step)

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT


def prepare(recipe: Recipe, folder: Path, saves: bool = True) -> Run:
    """Start Horovod, open the data set and build the task.

    Args:
        saves: True if every rank will write to the folder.

    **Ranks:** all, with the same recipe.
    **Raises:** DataError for missing samples; ConfigurationError if a rank cannot write to the
    folder, if recipes or data sets differ between ranks, if there are too few samples for a step,
    if the target is not a score of the task, or if the task has no `counted` or no accuracy.
    """
    if recipe.threads:
        # Must be set before TensorFlow runs anything
        tf.config.threading.set_intra_op_parallelism_threads(recipe.threads)
        tf.config.threading.set_inter_op_parallelism_threads(recipe.threads)
    comm = cx.init(node_size=recipe.node_size)
    if saves:
        _require_writable(comm, folder)
    # Each node reads its own file, which may be an old one
    _require_equal(comm, "recipe", recipe.name, settings_of(recipe), SAME_RECIPE)
    data_rank = DataRank(comm.topology, comm.rank, recipe.seed, recipe.threads)
    data = recipe.data.build(data_rank)
    batches = [recipe.batch(phase) for phase in recipe.phases]
    steps = tuple(
        data.steps(batch, phase.resolution)
        for batch, phase in zip(batches, recipe.phases, strict=True)
    )
    facts = {"samples": f"{data.count}", **getattr(data, "contents", {})}
    # A node whose copy lacks an empty class would give other labels to the same pictures
    facts |= {f"class {number}": name for number, name in enumerate(data.classes)}
    facts |= {f"steps of phases[{number}]": f"{count}" for number, count in enumerate(steps)}
    _require_equal(comm, "data set", f"that of the recipe {recipe.name!r}", facts, SAME_DATA)
    for number, count in enumerate(steps):
        if not count:
            raise cx.ConfigurationError(
                f"A step needs batch * ranks <= {data.count} samples. phases[{number}] has "
                f"{batches[number]} * {comm.topology.size}. Lower its batch, or batch_per_rank."
            )
    objective = recipe.task.build(data)
    check_counted(objective)
    check_scores(objective)
    if recipe.target:
        check_target(recipe.target, objective)
    return Run(recipe, folder, comm, data, objective, steps)


def _require_writable(comm: Comm, folder: Path) -> None:
    """Refuse a folder into which the run could not save. **Ranks:** all."""
    for rank, reason in enumerate(comm.gather_objects(why_not_writable(folder))):
        if not reason:
            continue
        needs = (
            f"A run needs a folder that every rank can write to. Received {folder}, of which rank "
            f"{rank} says: {reason}."
        )
        # The state of such a run is in memory alone, and would be lost with its end
        if not continues_from_memory(folder / CHECKPOINT):
            raise cx.ConfigurationError(f"{needs} Give another by --output.")
        if comm.rank == 0:
            log.error("%s Make room for it. %s", needs, RETRY)
        return


def _require_equal(comm: Comm, kind: str, name: str, values: dict[str, str], remedy: str) -> None:
    """Compare facts over the ranks. **Ranks:** all. **Raises:** ConfigurationError, on all."""
    comm.comparisons.state(Facts(kind, name, values, remedy))
    comm.gather_objects(None)  # Compares them


def settings_of(value: Any, name: str = "") -> dict[str, str]:
    """Return name -> value of the settings of a recipe that all ranks must share."""
    above = f"{name}." if name else ""
    if isinstance(value, BaseModel):
        below = [(f"{above}{key}", part) for key, part in value]
    elif isinstance(value, tuple) and any(isinstance(part, BaseModel) for part in value):
        below = [(f"{name}[{number}]", part) for number, part in enumerate(value)]
    else:  # Without paths, which may differ between nodes, and types that cannot be compared
        return {name: f"{value}"} if isinstance(value, SIMPLE) else {}
    return {key: text for row in below for key, text in settings_of(row[1], row[0]).items()}


def check_counted(objective: Objective) -> None:
    """Check that a user's own task has `counted`. **Raises:** ConfigurationError."""
    if not isinstance(getattr(objective, "counted", None), str):
        raise cx.ConfigurationError(
            "A task's objective needs `counted`: the unit of a batch's size, such as 'images'. "
            f"{type(objective).__name__} has none."
        )


def check_scores(objective: Objective) -> None:
    """Check that a user's own task has the scores of a row. **Raises:** ConfigurationError."""
    metrics = [metric if isinstance(metric, str) else metric.name for metric in objective.metrics()]
    if "accuracy" not in metrics or "test_accuracy" not in objective.scores:
        raise cx.ConfigurationError(
            "A task's objective needs a metric named 'accuracy' and the score 'test_accuracy', "
            f"because each epoch's row has them. {type(objective).__name__} has the metrics "
            f"{', '.join(metrics) or 'none'} and the scores {', '.join(objective.scores)}."
        )


def check_target(target: Target, objective: Objective) -> None:
    """Check that the target is a score of the task. **Raises:** ConfigurationError."""
    scores = [score.removeprefix("test_") for score in objective.scores]
    if target.score not in scores:
        raise cx.ConfigurationError(
            f"A target needs a score of the task: {', '.join(scores)}. Received {target.score!r}. "
            "Change target.score."
        )
