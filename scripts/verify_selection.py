"""Checks a contestant's first round, before its time counts in a benchmark of selection."""

from __future__ import annotations

import numpy as np


def verified(
    indices: np.ndarray, values: np.ndarray, kept: np.ndarray | None, total: np.ndarray, k: int
) -> bool:
    """Check k chosen entries of a vector, and what was kept of the others.

    Sent + kept must be the total, bit by bit, and the magnitude that was chosen >= 0.99 of the
    exact choice's.

    Args:
        indices, values: [k], what was chosen; the indices must be unique.
        kept: float32 [n], the residual afterwards; None: nothing is kept.
        total: float32 [n], gradient + residual.
        k: entries to choose.
    """
    good = indices.size == k == np.unique(indices).size and np.array_equal(values, total[indices])
    if kept is not None:
        rest = total.copy()
        rest[indices] = 0
        good = good and np.array_equal(kept, rest)
    size = np.abs(total)
    largest = np.partition(size, size.size - k)[size.size - k :].sum(dtype=np.float64)
    return bool(good and np.abs(values).sum(dtype=np.float64) >= 0.99 * largest)
