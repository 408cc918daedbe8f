"""Which gradients may travel together: sorted by scheme, route and dtype; long ones are cut."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfcommx import routes
from tfcommx.routes.base import Route
from tfcommx.terms import NO_COMPRESSION, Piece, PlanError, Scheme

# What the engine reduces, with the bytes of an entry; others travel as float32.
DENSE_DTYPES = {"float16": 2, "float32": 4, "float64": 8}


class Gradient(NamedTuple):
    """What the planner must know of a variable's gradient."""

    # Path of the variable.
    path: str
    shape: tuple[int, ...]
    # Name of the dtype.
    dtype: str

    @property
    def entries(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


class Stream(NamedTuple):
    """Gradients that may travel together."""

    scheme: Scheme
    route: Route
    # Of the flat vectors.
    dtype: str


# Position of a variable in backward order, and its gradient or a piece of it.
Member = tuple[int, Gradient]


def sort_into_streams(
    gradients: Sequence[Gradient], schemes: Mapping[str, Scheme], largest: int
) -> dict[Stream, list[Member]]:
    """Group the gradients, in backward order, by scheme, route and dtype; cut long ones."""
    streams: dict[Stream, list[Member]] = {}
    for order, gradient in enumerate(reversed(gradients)):
        stream = _stream_of(gradient, scheme_of(gradient.path, schemes))
        pieces = _cut(gradient, largest) if stream.route.sparse else [gradient]
        streams.setdefault(stream, []).extend((order, piece) for piece in pieces)
    return streams


def _stream_of(gradient: Gradient, scheme: Scheme) -> Stream:
    if gradient.dtype.startswith("complex"):
        raise PlanError(
            f"Real gradients are required. Received {gradient.dtype} for {gradient.path!r}. "
            "Train its real and its imaginary part as two variables."
        )
    route = routes.get(scheme.route)
    if route.sparse:
        small = len(gradient.shape) <= 1 or gradient.entries < scheme.dense_below
        if not small and gradient.dtype != "float64":
            return Stream(scheme, route, "float32")
        route = routes.get(scheme.dense_route)
    compresses = scheme.compression != NO_COMPRESSION and gradient.dtype != "float64"
    known = gradient.dtype in DENSE_DTYPES and not compresses
    dtype = gradient.dtype if known else "float32"
    return Stream(scheme, route, dtype)


def scheme_of(path: str, schemes: Mapping[str, Scheme]) -> Scheme:
    """Return the scheme of the first pattern that matches a variable's path.

    >>> scheme_of("dense/kernel", {"*kernel": Scheme("asa"), "*": Scheme()}).route
    'asa'

    **Raises:** PlanError if none matches.
    """
    for pattern, scheme in schemes.items():
        if matches(path, pattern):
            return scheme
    raise PlanError(
        f"No scheme for the variable {path!r}: none of the patterns {list(schemes)} matches. Add "
        "the pattern '*'."
    )


def matches(name: str, pattern: str) -> bool:
    """Tell whether a pattern matches a variable.

    A variable whose path another one has, too, has a number after its name.
    """
    return fnmatch.fnmatchcase(re.sub(r"#\d+$", "", name), pattern)


def _cut(gradient: Gradient, largest: int) -> list[Gradient]:
    """Cut a gradient into pieces of equal length, of at most `largest` entries."""
    size = gradient.entries
    if size <= largest:
        return [gradient]
    count = -(-size // largest)
    ends = [size * piece // count for piece in range(count + 1)]
    return [
        Gradient(Piece(gradient.path, start, stop).name, (stop - start,), gradient.dtype)
        for start, stop in itertools.pairwise(ends)
    ]
