"""Compares what training has made of weights with what it has made of others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def moved_alike(
    weights: Iterable[np.ndarray],
    reference: Iterable[np.ndarray],
    start: Iterable[np.ndarray],
    tolerance: float,
) -> bool:
    """Tell whether both have gone the same way from the same start, layer by layer.

    Movements are compared, because a step may move weights by less than any tolerance that goes
    by their size.

    Args:
        weights, reference: afterwards.
        start: of both.
        tolerance: share of the largest movement in the layer, by which an entry may be off.

    Returns:
        False also if a layer of the reference has not moved: nothing would be compared.
    """
    for mine, other, before in zip(weights, reference, start, strict=True):
        largest = np.abs(other.astype(np.float64) - before).max()
        apart = np.abs(other.astype(np.float64) - mine).max()
        if not (0 < largest < np.inf and apart <= tolerance * largest):  # NaN: False
            return False
    return True
