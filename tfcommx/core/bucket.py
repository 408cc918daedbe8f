"""Bucket: variables, or pieces of long ones, whose gradients travel together; Sparse: entries."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, cast

from typing_extensions import TypeVar

from tfcommx.core.scheme import NO_COMPRESSION
from tfcommx.core.wire_formats import ENTRY_BYTES, NARROW, PLAIN

# Entries of the longest piece; two of them and the padding fit int32 indices.
LARGEST = 2**30 - 2**20


class Piece(NamedTuple):
    """A stretch of a variable; a plan lists it as `path[start:stop]`, like a variable.

    >>> Piece.of("embedding[100:200]")
    Piece(path='embedding', start=100, stop=200)
    >>> Piece.of("embedding").name
    'embedding'
    """

    # Of the variable.
    path: str
    # Its first entry.
    start: int
    # After its last entry; None: the whole variable.
    stop: int | None

    @staticmethod
    def of(name: str) -> Piece:
        """Read a name of a plan."""
        found = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", name)
        return Piece(found[1], int(found[2]), int(found[3])) if found else Piece(name, 0, None)

    @property
    def name(self) -> str:
        """Write the name that a plan lists."""
        return self.path if self.stop is None else f"{self.path}[{self.start}:{self.stop}]"


class Sparse(NamedTuple):
    """k selected entries of a flat vector; the indices are unique and in [0, size)."""

    # Tensor of int32 [k].
    indices: Any
    # Tensor of float [k].
    values: Any
    # Length of the vector that they were selected from.
    size: int


@dataclass(frozen=True)
class RouteOptions:
    """What one route must know of a bucket and no other route; each route has a class of its own.

    Fields are numbers, strings, or the options of another route, so that a plan can be written as
    JSON.
    """

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> RouteOptions:
        """Make the options from what `dataclasses.asdict` returned of them.

        Args:
            found: field -> value, as JSON has it.

        **Raises:** TypeError for a field that the options don't have.
        """
        return cls(**found)


@dataclass(frozen=True)
class NoOptions(RouteOptions):
    """The options of a route that needs none."""


# Of the route of a bucket. `Bucket` alone is one of any route.
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
    # Of the flat vector: float16, float32 or float64.
    dtype: str
    # A name of the table in tfcommx.routes.
    route: str
    # A name of the table in tfcommx.selection.
    selection: str = "all"
    # Entries that one rank selects, >= 1; None on dense routes.
    k: int | None = None
    # Zeros that are appended so that the route can cut the vector into equal shards, >= 0.
    padding: int = 0
    # Of rules that choose at random.
    seed: int = 0
    # How entries are written; as `Scheme.wire`, but named.
    wire: str = PLAIN
    # The route's own, of the class that the route names.
    options: Options = field(default_factory=cast(Any, NoOptions))
    # In [0, 1): applied before the selection, or on dense routes to the sum over the ranks.
    momentum: float = 0.0
    # > 0: of the gradients of all buckets with the same value, on each rank; None: not clipped.
    clip_norm: float | None = None
    # What shorter vectors travel in place of the entries; as `Scheme.compression`.
    compression: str = NO_COMPRESSION
    # Of each variable, for a compression; others need no shapes.
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def compresses(self) -> bool:
        """Whether other, shorter vectors travel than the entries."""
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
        """Whether all entries travel, rounded to fewer bits."""
        return self.k is None and self.wire in NARROW

    @property
    def keeps_residual(self) -> bool:
        """Whether each rank keeps what it did not send: entries, or errors of what travelled."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can write, the options as a mapping."""
        return dataclasses.asdict(self)
