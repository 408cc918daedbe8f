"""The state of compressions on its way from plan to plan: by variable, as parts of sums.

It is equal on all ranks; rank 0 carries it, so that the sum of the parts is the state, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfcommx import compression
from tfcommx.terms import Bucket, Plan


def first(bucket: Bucket) -> np.ndarray:
    """Return the state before the first step of a bucket that compresses; equal on all ranks."""
    return compression.get(bucket.compression).first_state(bucket.shapes)


def by_variable(plan: Plan, kept: Mapping[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """Return a rank's part of the states of all variables.

    Args:
        plan: under which they were kept.
        kept: bucket name -> float32 [its state]: equal on all ranks.
        rank: whose they are.

    Returns:
        Variable path -> float32: the state on rank 0, nothing on the others. Variables without a
        state are left out.
    """
    buckets = [bucket for bucket in plan.buckets if bucket.name in kept and rank == 0]
    parts = [pair for bucket in buckets for pair in _cut(bucket, kept[bucket.name])]
    return {path: part for path, part in parts if part.size}


def of_bucket(bucket: Bucket, parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return this rank's part of a bucket's state: float32 [state entries].

    Zeros for a variable that has none, or one of another length, of another compression.
    """
    empty = np.zeros(sum(_sizes(bucket)), np.float32)
    fitting = [
        parts[path] if path in parts and parts[path].size == zeros.size else zeros
        for path, zeros in _cut(bucket, empty)
    ]
    return np.concatenate(fitting)


def chosen(bucket: Bucket, total: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the sum of the ranks' parts; for a variable of which nobody had one, what it was."""
    pairs = zip(_cut(bucket, total), _cut(bucket, before), strict=True)
    return np.concatenate([new if new.any() else old for (_, new), (_, old) in pairs])


def _cut(bucket: Bucket, state: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the variables of a bucket with the parts of its state."""
    parts = np.split(state, np.cumsum(_sizes(bucket))[:-1])
    return list(zip(bucket.variables, parts, strict=True))


def _sizes(bucket: Bucket) -> tuple[int, ...]:
    return compression.get(bucket.compression).state_sizes(bucket.shapes)
