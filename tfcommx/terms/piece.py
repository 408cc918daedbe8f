"""Piece: a stretch of a variable that is too long for one bucket."""

from __future__ import annotations

import re
from typing import NamedTuple

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
