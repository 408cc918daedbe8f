"""Checks by which benchmarks verify their results. Needs NumPy only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

PERIOD = 1009  # of the weights that entries are compared by
# Of as many entries at once.
WEIGHTS = np.tile(np.arange(PERIOD, dtype=np.int64) * 7927 % PERIOD + 1, 1024).astype(np.float64)


def gradient(rank: int, n: int) -> np.ndarray:
    """Return integers in [-8, 8] as float32[n], other ones on every rank.

    Their sums are exact in any order. They are compared by an exact weighted sum with integer
    weights, one number that a lost entry changes, so that nothing large has to travel.
    """
    return np.resize(
        ((np.arange(17) * (7919 + 2 * rank) + 31 * rank) % 17 - 8).astype(np.float32), n
    )


def weighted_sum(vector: np.ndarray) -> float:
    """Sum vector[i] * (i * 7927 % 1009 + 1): exact for integers while it stays below 2^53."""
    parts = (
        vector[start : start + len(WEIGHTS)].astype(np.float64)
        for start in range(0, len(vector), len(WEIGHTS))
    )
    return sum(float(part @ WEIGHTS[: len(part)]) for part in parts)


def selected_right(
    indices: np.ndarray,
    values: np.ndarray,
    kept: np.ndarray | None,
    total: np.ndarray,
    k: int,
    share: float,
) -> bool:
    """Check k chosen entries of a vector, and the residual of the others.

    Chosen entries + residual must equal the total, bit by bit, and the sum of the chosen magnitudes
    must be at least a share of the exact top-k's.

    Args:
        indices, values: [k], the chosen entries; the indices must be unique.
        kept: float32 [n], the residual afterwards; None: there is no residual.
        total: float32 [n], gradient + residual.
        k: entries to choose.
        share: in (0, 1]; 1 to rounding, for which another order of the sum may be the reason.
    """
    good = indices.size == k == np.unique(indices).size and np.array_equal(values, total[indices])
    if kept is not None:
        rest = total.copy()
        rest[indices] = 0
        good = good and np.array_equal(kept, rest)
    size = np.abs(total)
    largest = np.partition(size, size.size - k)[size.size - k :].sum(dtype=np.float64)
    return bool(good and np.abs(values).sum(dtype=np.float64) >= (share - 1e-9) * largest)


def moved_alike(
    weights: Iterable[np.ndarray],
    reference: Iterable[np.ndarray],
    start: Iterable[np.ndarray],
    tolerance: float,
) -> bool:
    """Return True if both have moved alike from the same start, layer by layer.

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
