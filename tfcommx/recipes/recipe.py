"""Recipes: a YAML file read into frozen, checked models, so that a bad setting is refused before
any process is busy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PlainValidator, ValidationError, model_validator

from tfcommx.planner.check import check_scheme
from tfcommx.recipes.reader import Part, RecipeError, YamlLoader, change, error_line, refuse_unknown
from tfcommx.terms import Scheme, Topology

YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _scheme(value: Any) -> Scheme:
    """Build a Scheme from a mapping; its own checks, and the tables of names, say what is wrong."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"A mapping such as {{route: hitopk, selection: mstopk, density: 0.05}} is required. "
            f"Received {value!r}."
        )
    refuse_unknown(value, [field.name for field in dataclasses.fields(Scheme)])
    scheme = Scheme(**value)
    # names and what fits what; the cluster is checked when it is known
    check_scheme(scheme, Topology(1, 1))
    return scheme


class Data(Part):
    """Which images, and how they are varied."""

    set: Literal["fashion_mnist"] = "fashion_mnist"
    # Where its files are; None: found or fetched
    folder: Path | None = None
    # Pixels of the full picture; the largest random shift of a batch, 0 for none
    shift: int = Field(1, ge=0, le=8)
    # Mirror each image left to right with probability 1/2: clothes have no left and right
    flip: bool = True
    # Folder of shared memory that holds one copy for all ranks of a node
    memory: Path = Path("/dev/shm")
    # Share of each node's images that is dealt out anew before each epoch but the first, sent from
    # memory to memory. Then nothing is loaded ahead over the end of an epoch.
    exchange: float = Field(0.0, ge=0, le=1)


class Model(Part):
    """A small convolutional network that takes any resolution, because it averages over all
    positions at its end.
    """

    # Filters of the 3x3 convolutions; after the first two a pooling halves the sides, where most of
    # the time would go.
    filters: tuple[Annotated[int, Field(ge=1)], ...] = Field((16, 32, 64), min_length=1)
    # Blocks with a short cut after them, with as many filters as the last
    residual: int = Field(1, ge=0)


class Phase(Part):
    """Some epochs at one resolution with one way of exchanging gradients."""

    epochs: int = Field(ge=1)
    # Pixels a side; small pictures first are cheap (progressive resizing)
    resolution: int = Field(ge=8)
    scheme: Annotated[Scheme, PlainValidator(_scheme)] = Scheme()
    # Densities of the phase's first epochs; then the scheme's
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


class Optimizer(Part):
    """Stochastic gradient descent with momentum."""

    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    # Part of a weight that lr = 1 takes away in a step; not for biases and batch norm
    weight_decay: float = Field(5e-4, ge=0)


class LearningRate(Part):
    """Linear warm-up to a peak, then decay to zero at the end of the run."""

    # The peak itself; this or the next
    peak: float | None = Field(None, gt=0, allow_inf_nan=False)
    # The peak for 256 images a step; grows with the batch
    peak_per_256: float | None = Field(None, gt=0, allow_inf_nan=False)
    # Large batches diverge when they start at the peak
    warm_up_epochs: float = Field(1, ge=0)
    decay: Literal["cosine", "linear"] = "cosine"

    @model_validator(mode="after")
    def _one_peak(self) -> LearningRate:
        if (self.peak is None) == (self.peak_per_256 is None):
            raise ValueError(
                "One of peak and peak_per_256 is required. "
                f"Received peak={self.peak}, peak_per_256={self.peak_per_256}."
            )
        return self

    def at(self, step: int, steps_per_epoch: int, steps: int, global_batch: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: in [0, steps); counted over the whole run.
            steps_per_epoch: >= 1.
            steps: of the whole run.
            global_batch: images a step over all ranks.
        """
        peak = self.peak if self.peak is not None else self.peak_per_256 * global_batch / 256
        warm_up = self.warm_up_epochs * steps_per_epoch
        if step < warm_up:
            return peak * (step + 1) / (warm_up + 1)
        done = (step - warm_up) / max(1.0, steps - warm_up)
        return peak * ((1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 1 - done)


class Recipe(Part):
    """All that a training run is made of."""

    # Of the folder below runs/
    name: str = Field(min_length=1, pattern=r"^\w[\w.-]*$")
    data: Data = Data()
    model: Model = Model()
    # Images a step on one rank
    batch_per_rank: int = Field(ge=1)
    phases: tuple[Phase, ...] = Field(min_length=1)
    optimizer: Optimizer = Optimizer()
    learning_rate: LearningRate
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    # As NumPy takes it; of the initial weights, the order of the images and their variation
    seed: int = Field(0, ge=0, lt=2**32)
    # What `tfcommx probe` wrote, on every node; None: nominal prices
    links: Path | None = None
    # Ranks that stand for a node; None: the real hosts
    node_size: int | None = Field(None, ge=1)
    # Of one operation in one process; None: TensorFlow's choice, all cores
    threads: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Recipe:
        if self.learning_rate.warm_up_epochs >= self.epochs:
            raise ValueError(
                f"learning_rate.warm_up_epochs must be less than the {self.epochs} epochs of all "
                "phases. "
                f"Received {self.learning_rate.warm_up_epochs}."
            )
        return self

    @model_validator(mode="after")
    def _momentum_once(self) -> Recipe:
        if self.optimizer.momentum and any(phase.scheme.momentum for phase in self.phases):
            raise ValueError(
                "Momentum must be applied once: the optimizer's or the schemes'. Received "
                "optimizer.momentum="
                f"{self.optimizer.momentum} (0.9 where left out). Set it to 0, or leave momentum "
                "out of the schemes."
            )
        return self

    @property
    def epochs(self) -> int:
        """Epochs of all phases."""
        return sum(phase.epochs for phase in self.phases)

    def scheme_of_epoch(self) -> list[Scheme]:
        """Return the scheme of every epoch, in order."""
        ladders = [(phase.scheme.warm_up(phase.warm_up), phase) for phase in self.phases]
        return [
            ladder.get(epoch, phase.scheme)
            for ladder, phase in ladders
            for epoch in range(phase.epochs)
        ]

    def phase_of_epoch(self) -> list[Phase]:
        """Return the phase of every epoch, in order."""
        return [phase for phase in self.phases for _ in range(phase.epochs)]


def read(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        settings: changes such as `phases.0.epochs=1`, in the file's terms; values are YAML.

    **Raises:** RecipeError that names the file, the place, what is wrong and the nearest key.
    """
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), YamlLoader)
    except OSError as error:
        raise RecipeError(f"The recipe {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{path}: a mapping of keys to values is required. Received {type(tree).__name__}."
        )
    for setting in settings:
        change(tree, setting)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(
            "\n".join(f"{path}: {error_line(detail)}" for detail in error.errors())
        ) from error
