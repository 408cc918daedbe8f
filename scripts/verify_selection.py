"""What a benchmark of selection must see in a contestant's first round before its time counts."""

from __future__ import annotations

import numpy as np


def verified(
    indices: np.ndarray, values: np.ndarray, kept: np.ndarray | None, total: np.ndarray, k: int
) -> bool:
    """Check k unique entries of `total` float32 [n] that were chosen, and what was kept of the
    others (None: nothing is).

    Sent + kept must be the total, bit by bit, and the magnitude that was chosen >= 0.99 of the
    exact choice's.
    """
    good = indices.size == k == np.unique(indices).size and np.array_equal(values, total[indices])
    if kept is not None:
        rest = total.copy()
        rest[indices] = 0
        good = good and np.array_equal(kept, rest)
    size = np.abs(total)
    largest = np.partition(size, size.size - k)[size.size - k :].sum(dtype=np.float64)
    return bool(good and np.abs(values).sum(dtype=np.float64) >= 0.99 * largest)
