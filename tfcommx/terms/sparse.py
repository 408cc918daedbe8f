"""Sparse: the selected entries of a vector."""

from __future__ import annotations

from typing import Any, NamedTuple


class Sparse(NamedTuple):
    """k selected entries of a flat vector; the indices are unique and in [0, size)."""

    # Tensor of int32 [k].
    indices: Any
    # Tensor of float [k].
    values: Any
    # Length of the vector that they were selected from.
    size: int
