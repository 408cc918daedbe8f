"""Layer and LayerTable: the work and the variables of a model's layers, without the model."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from tfcommx.terms.checks import PlanError


class Layer(NamedTuple):
    """A layer of a model: its multiply-adds and its variables."""

    # Unique in its table.
    name: str
    # Multiply-adds of the forward pass for one sample, >= 0.
    operations: float
    # (name of the variable in the layer, its shape), in forward order; none is allowed.
    variables: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class LayerTable:
    """The layers of a model in forward order.

    >>> table = LayerTable("tiny", (Layer("dense", 80, (("kernel", (8, 10)), ("bias", (10,)))),))
    >>> table.tensors, table.parameters, table.operations
    (2, 90, 80)
    """

    # Of the model.
    name: str
    # In forward order.
    layers: tuple[Layer, ...]
    # What a sample is.
    sample: str = "a sample"

    def __post_init__(self) -> None:
        twice = [name for name, times in Counter(x.name for x in self.layers).items() if times > 1]
        if twice or not self.tensors or not self.operations > 0:
            raise PlanError(
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
