"""Bucket: variables, or pieces of them, whose gradients travel together; Sparse: entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, cast

from typing_extensions import TypeVar

from tfcommx.core.scheme import NO_COMPRESSION
from tfcommx.core.wire_formats import ENTRY_BYTES, NARROW, PLAIN

# Entries of the longest piece; two such pieces and their padding fit int32 indices.
LARGEST = 2**30 - 2**20


class Piece(NamedTuple):
    """A contiguous part of a variable; a plan lists it as `path[start:stop]`, like a variable.

    >>> Piece.of("embedding[100:200]")
    Piece(path='embedding', start=100, stop=200)
    >>> Piece.of("embedding").name
    'embedding'
    """

    # Path of the variable.
    path: str
    # Index of the first entry.
    start: int
    # Index after the last entry; None: the whole variable.
    stop: int | None

    @staticmethod
    def of(name: str) -> Piece:
        """Parse a name of a plan."""
        match = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
        return Piece(match[1], int(match[2]), int(match[3])) if match else Piece(name, 0, None)

    @property
    def name(self) -> str:
        """Return the name that a plan lists."""
        return self.path if self.stop is None else f"{self.path}[{self.start}:{self.stop}]"


class Sparse(NamedTuple):
    """k selected entries of a flat vector; the indices are unique and in [0, size)."""

    # Tensor, int32 [k].
    indices: Any
    # Tensor, float [k].
    values: Any
    # Length of the vector that they were selected from.
    size: int


@dataclass(frozen=True)
class RouteOptions:
    """Options of a bucket that only its route uses; each route has a separate class.

    Fields are numbers, strings, or the options of another route, because a plan is written as JSON.
    """

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RouteOptions:
        """Make the options from their fields, as `dataclasses.asdict` returns them.

        **Raises:** TypeError for an unknown field.
        """
        return cls(**fields)


@dataclass(frozen=True)
class NoOptions(RouteOptions):
    """The options of a route that needs none."""


# Class of the options of a bucket's route; `Bucket` without it is a bucket of any route.
Options = TypeVar("Options", bound=RouteOptions, default=Any)


@dataclass(frozen=True)
class Bucket(Generic[Options]):
    """Variables whose gradients travel together as one flat vector, in backward order.

    >>> bucket = Bucket("b", ("bias", "kernel"), (10, 25), "float16", "torus", padding=1)
    >>> bucket.size, bucket.padded, bucket.entry_bytes
    (35, 36, 2)
    """

    # Unique in its plan; collectives are named after it.
    name: str
    # Variable paths, or the names of pieces of a variable that is cut.
    variables: tuple[str, ...]
    # Entries of each variable.
    sizes: tuple[int, ...]
    # Dtype of the flat vector: float16, float32 or float64.
    dtype: str
    # A name of the table in tfcommx.routes.
    route: str
    # A name of the table in tfcommx.selection.
    selection: str = "all"
    # Entries that one rank selects, >= 1; None on dense routes.
    k: int | None = None
    # Zeros appended to the vector, which the route cuts into equal shards, >= 0.
    padding: int = 0
    # Seed of rules that choose at random.
    seed: int = 0
    # Name of the wire format of the entries; see `Scheme.wire`.
    wire: str = PLAIN
    # Options of the route, of the class that the route names.
    options: Options = field(default_factory=cast(Any, NoOptions))
    # Momentum in [0, 1), applied before selection, or on dense routes to the sum over the ranks.
    momentum: float = 0.0
    # Largest norm per rank of the gradients of all buckets with this value, > 0; None: not clipped.
    clip_norm: float | None = None
    # Name of the compression, whose vectors travel in place of the entries; see
    # `Scheme.compression`.
    compression: str = NO_COMPRESSION
    # Shape of each variable; only compressions need it.
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def compresses(self) -> bool:
        """True if the vectors of a compression travel in place of the entries."""
        return self.compression != NO_COMPRESSION

    @property
    def size(self) -> int:
        """Entries of the variables, without padding."""
        return sum(self.sizes)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of the flat vector."""
        return ENTRY_BYTES[self.dtype]

    @property
    def padded(self) -> int:
        """Entries of the flat vector, with padding."""
        return self.size + self.padding

    @property
    def padded_bytes(self) -> int:
        """Bytes of the flat vector, with padding."""
        return self.padded * self.entry_bytes

    @property
    def rounds(self) -> bool:
        """True if all entries travel, rounded to fewer bits."""
        return self.k is None and self.wire in NARROW

    @property
    def keeps_residual(self) -> bool:
        """True if each rank keeps a residual: entries that it did not send, or their errors."""
        return self.k is not None or self.rounds or self.compresses

    @property
    def selected(self) -> int:
        """The k of a bucket on a sparse route.

        **Raises:** ValueError on a dense route, which selects nothing.
        """
        if self.k is None:
            raise ValueError(
                f"A bucket on a sparse route needs k. Received k=None in {self.name!r}."
            )
        return self.k
