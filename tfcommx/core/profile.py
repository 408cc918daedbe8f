"""Profile: the times of a training step on one rank; LayerTable: a model's layers, without it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tfcommx.core.checks import check_number, check_whole
from tfcommx.core.errors import ConfigurationError
from tfcommx.core.files import local_path, reading

# What to do about a missing or damaged profile
MEASURE = "Write one: `tfcommx profile RECIPE`, or `Profile.to_json`."


class Layer(NamedTuple):
    """A layer of a model: its multiply-adds and its variables."""

    # Unique in its table.
    name: str
    # Multiply-adds of the forward pass for one sample, >= 0.
    operations: float
    # (name of the variable in the layer, its shape), in forward order; may be empty.
    variables: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class LayerTable:
    """The layers of a model in forward order.

    >>> table = LayerTable("tiny", (Layer("dense", 80, (("kernel", (8, 10)), ("bias", (10,)))),))
    >>> table.tensors, table.parameters, table.operations
    (2, 90, 80)
    """

    # Name of the model.
    name: str
    # Layers in forward order.
    layers: tuple[Layer, ...]
    # Name of a sample, with its article.
    sample: str = "a sample"

    def __post_init__(self) -> None:
        twice = [name for name, times in Counter(x.name for x in self.layers).items() if times > 1]
        if twice or not self.tensors or not self.operations > 0:
            raise ConfigurationError(
                "A table of layers needs unique names, a variable and an operation. Received "
                f"{self.name!r} with {len(self.layers)} layers, {self.tensors} variables and "
                f"{self.operations} operations; names that come twice: {twice}."
            )

    @property
    def tensors(self) -> int:
        """Number of variables."""
        return sum(len(layer.variables) for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Number of entries of all variables."""
        return sum(math.prod(shape) for layer in self.layers for _, shape in layer.variables)

    @property
    def operations(self) -> float:
        """Multiply-adds of the forward pass for one sample."""
        return sum(layer.operations for layer in self.layers)


# Share of the forward pass in a step that is derived from a throughput. It is a third, because the
# backward pass computes two products, by the inputs and by the weights, per product of the forward
# pass.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class VariableProfile:
    """Measured times of one variable and its gradient.

    >>> VariableProfile("dense/kernel", (8, 10), ready_s=0.01).size
    80
    """

    # Path of the variable.
    name: str
    shape: tuple[int, ...]
    # Name of the dtype of the gradient.
    dtype: str = "float32"
    # Seconds from the start of the backward pass until the gradient is ready, >= 0: the mean over
    # steps.
    ready_s: float = 0.0
    # Standard deviation of ready_s over steps, >= 0.
    ready_spread_s: float = 0.0
    # Seconds of the forward pass of its layer, >= 0, shared equally by the layer's variables.
    forward_s: float = 0.0
    # Seconds of selecting from it at `Profile.density`, with copying, writing and merging but
    # without messages, >= 0; None: not known.
    selection_s: float | None = None
    # Seconds of updating it, >= 0; None: not known, or included in the other times.
    update_s: float | None = None

    def __post_init__(self) -> None:
        shape = tuple(check_whole(f"shape of {self.name!r}", length) for length in self.shape)
        object.__setattr__(self, "shape", shape)
        for name in ("ready_s", "ready_spread_s", "forward_s", "selection_s", "update_s"):
            value = getattr(self, name)
            if value is not None or name not in ("selection_s", "update_s"):
                seconds = check_number(f"{name} of {self.name!r}", value, ">= 0")
                object.__setattr__(self, name, seconds)
        if any(length < 0 for length in shape):
            raise ConfigurationError(
                f"Lengths >= 0 are required. Received shape={shape} of {self.name!r}."
            )

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Profile:
    """A training step of one rank without exchange, variable by variable in backward order.

    >>> late = VariableProfile("first/kernel", (8, 10), ready_s=0.02)
    >>> soon = VariableProfile("last/kernel", (10, 2), ready_s=0.01)
    >>> profile = Profile("tiny", (soon, late), forward_s=0.01, backward_s=0.025, batch=32)
    >>> profile.compute_s, profile.samples_per_second
    (0.035, 914.2857142857142)
    >>> Profile.from_json(profile.to_json()) == profile
    True
    """

    # Name of the model.
    model: str
    # Variables in the reverse of the model's order. Their gradients are ready in about this order;
    # if a measured one is not, `ready_s` counts.
    variables: tuple[VariableProfile, ...]
    # Seconds of the whole forward pass, >= 0.
    forward_s: float
    # Seconds of the whole backward pass, >= every ready_s.
    backward_s: float
    # Samples of one rank in a step, >= 1.
    batch: int
    # Number of measured steps, >= 0; 0: derived, not measured.
    steps: int = 0
    # Density at which selection times were measured, in (0, 1]; None: not measured.
    density: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("steps", 0)):
            object.__setattr__(self, name, check_whole(name, getattr(self, name), least))
        for name in ("forward_s", "backward_s"):
            object.__setattr__(self, name, check_number(name, getattr(self, name), ">= 0"))
        if self.density is not None:
            density = check_number("density", self.density, "in (0, 1]")
            object.__setattr__(self, "density", density)
        self._check_variables()

    def _check_variables(self) -> None:
        counts = Counter(variable.name for variable in self.variables)
        if twice := [name for name, times in counts.items() if times > 1]:
            raise ConfigurationError(
                f"Each variable must be in a profile once. Received twice: {twice}."
            )
        for variable in self.variables:
            # With a tolerance for the rounding errors of a sum of many parts
            if variable.ready_s > self.backward_s * (1 + 1e-9):
                raise ConfigurationError(
                    "Each gradient is ready before the backward pass ends. Received "
                    f"ready_s={variable.ready_s} of {variable.name!r} with "
                    f"backward_s={self.backward_s}."
                )

    @property
    def update_s(self) -> float:
        """Seconds of updating all variables, as far as they are known."""
        return math.fsum(variable.update_s or 0.0 for variable in self.variables)

    @property
    def compute_s(self) -> float:
        """Seconds of a step without exchange."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def samples_per_second(self) -> float:
        """Throughput of one rank without exchange."""
        return self.batch / self.compute_s

    @property
    def timed(self) -> bool:
        """True if it has the times at which gradients are ready; one made by `of_sizes` has not."""
        return self.backward_s > 0

    @property
    def size(self) -> int:
        """Entries of all variables."""
        return sum(variable.size for variable in self.variables)

    def scaled(self, factor: float, update_factor: float) -> Profile:
        """Return the profile with other times of computing and of updates; selections stay.

        >>> slow = Profile("tiny", (), forward_s=0.1, backward_s=0.3, batch=1).scaled(2, 1)
        >>> slow.forward_s, slow.backward_s
        (0.2, 0.6)
        """
        rows = tuple(
            dataclasses.replace(
                row,
                ready_s=factor * row.ready_s,
                forward_s=factor * row.forward_s,
                update_s=None if row.update_s is None else update_factor * row.update_s,
            )
            for row in self.variables
        )
        return dataclasses.replace(
            self,
            variables=rows,
            forward_s=factor * self.forward_s,
            backward_s=factor * self.backward_s,
        )

    def to_json(self) -> str:
        """Return the profile as JSON, one variable per line."""
        head = {name: value for name, value in vars(self).items() if name != "variables"}
        rows = ",\n  ".join(json.dumps(dataclasses.asdict(row)) for row in self.variables)
        return f'{json.dumps(head)[:-1]}, "variables": [\n  {rows}\n]}}\n'

    @staticmethod
    def from_json(text: str, origin: str | Path = "") -> Profile:
        """Parse the result of `to_json`.

        Args:
            origin: name of the text in errors; "": its beginning.

        **Raises:** DataError for anything else.
        """
        with reading("A profile", origin or f"{text[:60]!r}", MEASURE):
            read: Mapping[str, Any] = json.loads(text)
            rows = tuple(
                VariableProfile(**{**row, "shape": tuple(row["shape"])})
                for row in read["variables"]
            )
            return Profile(**{**read, "variables": rows})

    @staticmethod
    def read(path: str | Path) -> Profile:
        """Read a file that `to_json` wrote.

        **Raises:** DataError if the file is missing or invalid.
        """
        with reading("A profile", path, MEASURE):
            return Profile.from_json(local_path("path", path).read_text(), path)

    @staticmethod
    def of_sizes(model: str, variables: tuple[VariableProfile, ...]) -> Profile:
        """Make a profile of sizes without times; mergings that need times refuse it."""
        rows = tuple(VariableProfile(row.name, row.shape, row.dtype) for row in variables)
        return Profile(model, rows, 0.0, 0.0, batch=1)

    @staticmethod
    def from_throughput(
        model: LayerTable, samples_per_second: float, *, batch: int, dtype: str = "float32"
    ) -> Profile:
        """Derive a profile from a table of layers and the throughput of one rank.

        The step takes batch / samples_per_second: a third is the forward pass, two thirds the
        backward pass. Each layer has the same share of both as of the multiply-adds, and its
        gradients are ready at the end of its share. Therefore layers that wait for memory rather
        than compute are too fast, and the first layer, which needs no gradient of its input, is too
        slow. The update is included in these times.

        Args:
            model: layers in forward order.
            samples_per_second: throughput of one rank without exchange, > 0.
            batch: samples of one rank in a step, >= 1.
            dtype: dtype of the gradients.

        **Raises:** ConfigurationError for a throughput or a batch that is not positive.
        """
        check_number("samples_per_second", samples_per_second, "> 0")
        batch = check_whole("batch", batch)
        step = batch / samples_per_second
        forward, backward = step * FORWARD_SHARE, step * (1 - FORWARD_SHARE)
        rows, done, total = [], 0.0, model.operations
        for layer in reversed(model.layers):
            done += layer.operations
            for name, shape in reversed(layer.variables):
                share = layer.operations / total / len(layer.variables)
                rows.append(
                    VariableProfile(
                        f"{layer.name}/{name}",
                        shape,
                        dtype,
                        # At most 1, because the sum of the shares is rounded
                        ready_s=min(done / total, 1.0) * backward,
                        forward_s=share * forward,
                    )
                )
        return Profile(model.name, tuple(rows), forward, backward, batch)
