"""Residuals by variable: what ranks have computed and not sent yet."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfcommx import routes
from tfcommx.terms import Piece, Plan

Residuals = dict[str, np.ndarray]  # variable path -> float32[size]: what this rank has not sent yet


def residuals_by_variable(plan: Plan, kept: Mapping[str, np.ndarray], rank: int) -> Residuals:
    """Return `rank`'s part of the residuals, or velocities, that it keeps under a plan, by
    variable, without zeros.

    Args:
        kept: bucket name -> float32 [its shard]; of a dense bucket every rank keeps the sum over
            the ranks.
    """
    found: Residuals = {}
    pieces = [Piece.of(name) for bucket in plan.buckets for name in bucket.variables]
    for bucket in plan.buckets:
        if bucket.name in kept:
            start, stop = routes.get(bucket.route).shard(bucket, plan.topology, rank)
            whole = np.zeros(bucket.padded, np.float32)
            whole[start:stop] = kept[bucket.name] / np.float32(
                1 if bucket.k is not None else plan.topology.size
            )
            # what follows the last cut is padding, always zero
            parts = np.split(whole, np.cumsum(bucket.sizes))
            for piece, part in zip(map(Piece.of, bucket.variables), parts, strict=False):
                if piece.stop is None or not part.any():
                    found |= {piece.path: part} if part.any() else {}
                    continue
                length = max(other.stop for other in pieces if other.path == piece.path)
                found.setdefault(piece.path, np.zeros(length, np.float32))[
                    piece.start : piece.stop
                ] = part
    return found
