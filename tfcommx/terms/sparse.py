"""Sparse: the selected entries of a vector."""

from __future__ import annotations

from typing import Any, NamedTuple


class Sparse(NamedTuple):
    """k selected entries of a flat vector; the indices are unique and in [0, size)."""

    # int32 [k]
    indices: Any
    # Float [k]
    values: Any
    # Length of the vector that they were selected from
    size: int
