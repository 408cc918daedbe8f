"""A recipe: a YAML file read into frozen, checked models, before any process starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationError, model_validator

from tfcommx.core import Scheme, Topology, check_name
from tfcommx.planner.check import check_scheme
from tfcommx.recipes.datasets import DATASETS
from tfcommx.recipes.datasets.picture_dataset import PictureDataset
from tfcommx.recipes.families import Dataset, Model, Objective, OptimizerRecipe, Task
from tfcommx.recipes.models import MODELS
from tfcommx.recipes.optimizers import OPTIMIZERS
from tfcommx.recipes.reader import (
    RecipeError,
    RecipePart,
    change,
    error_lines,
    member_of,
    read_mapping,
)
from tfcommx.recipes.schedules import SCHEDULES, Schedule
from tfcommx.recipes.strategies import STRATEGIES, StrategyRecipe
from tfcommx.recipes.tasks import TASKS
from tfcommx.recipes.user import UserDataset, UserModel, UserOptimizer, UserTask

if TYPE_CHECKING:
    import keras


def _scheme(value: Any) -> Scheme:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"A mapping such as {{route: hitopk, selection: mstopk, density: 0.05}} is required. "
            f"Received {value!r}."
        )
    names = [field.name for field in dataclasses.fields(Scheme)]
    for key in value:
        check_name("key", key, names)
    scheme = Scheme(**value)
    # Names and combinations only, because the cluster is not known yet
    check_scheme(scheme, Topology(1, 1))
    return scheme


class Phase(RecipePart):
    """Some epochs at one resolution and with one scheme."""

    # Number of passes over the training data, limited because a run lists its epochs
    epochs: int = Field(ge=1, le=1_000_000)
    # Pixels of a side; small pictures in the first phases save time (progressive resizing). For
    # text, word pieces of the longest sentence
    resolution: int = Field(ge=8)
    # Samples per step and rank; None: the recipe's `batch_per_rank`
    batch: int | None = Field(None, ge=1)
    # Factor of the learning rate in this phase
    learning_rate_factor: float = Field(1.0, gt=0, allow_inf_nan=False)
    # Scheme of the gradient exchange; the default is Horovod's allreduce for all gradients
    scheme: Annotated[Scheme, PlainValidator(_scheme, json_schema_input_type=Scheme)] = Scheme()
    # Densities of the phase's first epochs, before the scheme's
    warm_up: tuple[Annotated[float, Field(gt=0, le=1)], ...] = ()

    @model_validator(mode="after")
    def _warm_up_fits(self) -> Phase:
        if len(self.warm_up) > self.epochs:
            raise ValueError(
                f"warm_up needs at most one density for each of the {self.epochs} epochs. "
                f"Received {list(self.warm_up)}."
            )
        if self.warm_up and self.scheme.selection == "all":
            raise ValueError(
                "warm_up needs a scheme with a selection other than 'all', which has a density. "
                f"Received route={self.scheme.route!r}."
            )
        return self


class LearningRate(RecipePart):
    """Linear warm-up to a peak, then the decay of a schedule until the end of the run."""

    # Peak of the learning rate; either this or peak_per_256 is required
    peak: float | None = Field(None, gt=0, allow_inf_nan=False)
    # Peak for 256 samples per step, scaled with the global batch
    peak_per_256: float | None = Field(None, gt=0, allow_inf_nan=False)
    # Epochs of the warm-up, needed because large batches diverge if they start at the peak
    warm_up_epochs: float = Field(1, ge=0)
    # Steps of the warm-up; replaces warm_up_epochs
    warm_up_steps: int | None = Field(None, ge=0)
    # Schedule of the decay: its name, or a mapping with its settings
    decay: Annotated[Schedule, member_of(SCHEDULES, "cosine", by_name=True)] = Field(
        "cosine", validate_default=True
    )

    @model_validator(mode="after")
    def _one_peak(self) -> LearningRate:
        if (self.peak is None) == (self.peak_per_256 is None):
            raise ValueError(
                "One of peak and peak_per_256 is required. "
                f"Received peak={self.peak}, peak_per_256={self.peak_per_256}."
            )
        return self

    def at(self, step: float, steps_per_epoch: int, steps: int, global_batch: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: step of the whole run, in [0, steps).
            global_batch: samples per step over all ranks, >= 1.
        """
        peak = self.peak or (self.peak_per_256 or 0.0) * global_batch / 256
        warm_up: float | None = self.warm_up_steps
        if warm_up is None:
            warm_up = self.warm_up_epochs * steps_per_epoch
        if step < warm_up:
            # The first step has a rate above 0, and the step after the warm-up the peak
            return peak * (step + 1) / (warm_up + 1)
        return peak * self.decay.factor(step, warm_up, steps, steps_per_epoch)


class Target(RecipePart):
    """A score that the evaluation should reach; the run continues after that.

    **Source:** DAWNBench's instructions for ImageNet (github.com/stanford-futuredata/
    dawn-bench-entries, README): the first epoch with a top-5 accuracy of at least 93 %.
    """

    # Name of the score in the task, without `test_`: accuracy, top5, bleu
    score: str = Field("accuracy", min_length=1)
    at_least: float = Field(allow_inf_nan=False)


class CheckpointSettings(RecipePart):
    """Checkpoints in addition to those at the end of each epoch, of the run, and on a stop."""

    # Steps between two checkpoints, over the whole run; None: not by steps
    every_steps: int | None = Field(None, ge=1)
    # Minutes between two checkpoints, by rank 0's clock; None: not by time
    every_minutes: float | None = Field(None, gt=0)
    # Steps between two snapshots in memory, in a supervised run (`--min-np`); None: only before a
    # host leaves or joins
    memory_every: int | None = Field(None, ge=1)
    # Number of checkpoints to keep
    keep: int = Field(3, ge=1)


class Recipe(RecipePart):
    """A whole training run."""

    # Name of the run's folder in runs/
    name: str = Field(min_length=1, pattern=r"^\w[\w.-]*$")
    # Data set and its settings
    data: Annotated[Dataset, member_of(DATASETS, "fashion_mnist", UserDataset)] = Field(
        {}, validate_default=True
    )
    # Network and its sizes
    model: Annotated[Model, member_of(MODELS, "small_cnn", UserModel)] = Field(
        {}, validate_default=True
    )
    # Task: loss, metrics and scores
    task: Annotated[Task, member_of(TASKS, "classify", UserTask)] = Field({}, validate_default=True)
    # Samples per step and rank, for text word pieces; a phase may override it
    batch_per_rank: int = Field(ge=1)
    # Phases of the run, in order
    phases: tuple[Phase, ...] = Field(min_length=1)
    # Optimizer without its learning rate
    optimizer: Annotated[OptimizerRecipe, member_of(OPTIMIZERS, "sgd", UserOptimizer)] = Field(
        {}, validate_default=True
    )
    # Learning rate over the whole run
    learning_rate: LearningRate
    # Strategy: how weights are updated, and how often ranks exchange
    strategy: Annotated[StrategyRecipe, member_of(STRATEGIES, "synchronous", by_name=True)] = Field(
        "synchronous", validate_default=True
    )
    # Score whose time to reach is reported; None: no target
    target: Target | None = None
    # Intervals of checkpoints, and the number to keep
    checkpoint: CheckpointSettings = CheckpointSettings()
    # Type of the network's computations; weights are float32. Half precision is fast on GPUs with
    # tensor cores, and slow on CPUs
    precision: Literal["float32", "mixed_float16", "mixed_bfloat16"] = "float32"
    # Seed of the initial weights, the order of the samples and their augmentation
    seed: int = Field(0, ge=0, lt=2**32)
    # File of `tfcommx probe`, on every node; None: nominal prices
    links: Path | None = None
    # Number of ranks that count as a node; None: as on the hosts
    node_size: int | None = Field(None, ge=1)
    # Threads of one operation in one process; None: TensorFlow's default, all cores
    threads: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        rate = self.learning_rate
        if rate.warm_up_steps is None and rate.warm_up_epochs >= self.epochs:
            raise ValueError(
                f"learning_rate.warm_up_epochs must be less than the {self.epochs} epochs of all "
                f"phases. Received {rate.warm_up_epochs}."
            )
        if self.optimizer.momentum and any(phase.scheme.momentum for phase in self.phases):
            raise ValueError(
                "Momentum must be applied once: the optimizer's or the schemes'. Received "
                f"optimizer.momentum={self.optimizer.momentum} (0.9 if it is not given). Set it to "
                "0, or leave momentum out of the schemes."
            )
        least = min(phase.resolution for phase in self.phases)
        if isinstance(self.data, PictureDataset) and not round(least * self.data.test_scale):
            raise ValueError(
                "data.test_scale must leave a pixel of a side in tests. Received "
                f"{self.data.test_scale} for a phase of the resolution {least}. Raise it."
            )
        if "resolution" not in getattr(type(self.model), "model_fields", {}):
            return self
        pixels = self.model.resolution  # type: ignore[attr-defined]
        for number, phase in enumerate(self.phases):
            if phase.resolution != pixels:
                raise ValueError(
                    "A model with its own `resolution` needs phases of the same. Received "
                    f"model.resolution={pixels} and phases.{number}.resolution={phase.resolution}."
                )
        scale = getattr(self.data, "test_scale", 1.0)
        if round(pixels * scale) != pixels:
            raise ValueError(
                "A model with its own `resolution` needs test pictures of the same. Received "
                f"data.test_scale={scale}. Set it to 1."
            )
        return self

    def batch(self, phase: Phase) -> int:
        """Return the samples per step and rank in a phase."""
        return phase.batch or self.batch_per_rank

    def rate(self, epoch: int, step: float, steps_per_epoch: int, ranks: int) -> float:
        """Return the learning rate of a step.

        Args:
            epoch: epoch of the whole run, in [0, epochs).
            step: step of the epoch, in [0, steps_per_epoch). In a phase with another number of
                steps per epoch, the step of the first phase at the same share of the epoch.
            steps_per_epoch: number of steps per epoch of the first phase, >= 1.
            ranks: number of ranks, >= 1.
        """
        phase = self.phase_of_epoch()[epoch]
        # Counted in steps of the first phase, because phases may differ in batch and therefore in
        # steps per epoch
        steps, step = self.epochs * steps_per_epoch, epoch * steps_per_epoch + step
        rate = self.learning_rate.at(step, steps_per_epoch, steps, self.batch(phase) * ranks)
        return phase.learning_rate_factor * rate

    def build_model(self, objective: Objective) -> keras.Model:
        """Build the network for an objective, with the recipe's precision."""
        import keras

        # Restored below, because Keras's policy holds for all later models of the process
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.precision)
        try:
            return self.model.build(objective.inputs, objective.outputs)
        finally:
            keras.config.set_dtype_policy(before)

    @property
    def epochs(self) -> int:
        """Number of epochs of all phases."""
        return sum(phase.epochs for phase in self.phases)

    def scheme_of_epoch(self) -> list[Scheme]:
        """Return the scheme of every epoch, in order."""
        return [
            phase.scheme.warm_up(phase.warm_up).get(epoch, phase.scheme)
            for phase in self.phases
            for epoch in range(phase.epochs)
        ]

    def phase_of_epoch(self) -> list[Phase]:
        """Return the phase of every epoch, in order."""
        return [phase for phase in self.phases for _ in range(phase.epochs)]


def read(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        settings: changes such as `phases.0.epochs=1`; values are YAML.

    **Raises:** RecipeError with the file, the field, the problem and the nearest key.
    """
    tree = read_mapping(Path(path), "The recipe")
    for setting in settings:
        change(tree, setting)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        lines = [f"{path}: {line}" for line in error_lines(error)]
        raise RecipeError("\n".join(lines)) from error
