"""The state of compressions on its way from plan to plan: by variable, as parts of sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfcommx import compression
from tfcommx.terms import Bucket, Plan


def first(bucket: Bucket) -> np.ndarray:
    """Return the state before the first step of a bucket that compresses; equal on all ranks."""
    return compression.get(bucket.compression).first_state(bucket.shapes)


def by_variable(plan: Plan, kept: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a rank's equal part of the states of all variables.

    Args:
        plan: under which they were kept.
        kept: bucket name -> float32 [its state]: equal on all ranks.

    Returns:
        Variable path -> float32: the state over the number of ranks, so that their sum is the
        state, as those of residuals are. Variables without a state are left out.
    """
    found = {}
    for bucket in (bucket for bucket in plan.buckets if bucket.name in kept):
        equal_part = kept[bucket.name] / np.float32(plan.topology.size)
        found |= {path: part for path, part in _cut(bucket, equal_part) if part.size}
    return found


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
