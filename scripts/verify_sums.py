"""Gradients whose sums are exact in any order, and one number that a lost entry changes.

The gradients are small integers. They are compared by an exact weighted sum with integer weights,
so that nothing large has to travel for the check.
"""

from __future__ import annotations

import numpy as np

PERIOD = 1009  # of the weights that entries are compared by
# Of as many entries at once.
WEIGHTS = np.tile(np.arange(PERIOD, dtype=np.int64) * 7927 % PERIOD + 1, 1024).astype(np.float64)


def gradient(rank: int, n: int) -> np.ndarray:
    """Return integers in [-8, 8] as float32[n], other ones on every rank."""
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
