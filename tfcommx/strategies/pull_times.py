"""Times of pulls and forward passes by layer, for pulls in batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tfcommx import engines
from tfcommx.planner.merging.pulls import PullTimes
from tfcommx.terms import Links, PlanError, Profile, Topology


def layers_of(paths: Sequence[str]) -> list[tuple[int, int]]:
    """Return [start, stop) of consecutive variables of the same layer.

    >>> layers_of(["net/first/kernel", "net/first/bias", "net/last/kernel"])
    [(0, 2), (2, 3)]
    """
    lengths = [
        len(list(members))
        for _, members in itertools.groupby(paths, key=lambda path: path.rpartition("/")[0])
    ]
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def pull_times(
    profile: Profile,
    layers: Sequence[tuple[int, int]],
    weights: Sequence[Any],
    topology: Topology,
    links: Links,
    group: str = "world",
) -> PullTimes:
    """Return what pulls and the forward pass of each layer take.

    Args:
        profile: of this model, with times; matched by order and shape, as names may differ.
        layers: [start, stop) of the variables of each, in forward order.
        weights: in forward order, each with `shape` and `dtype`.
        topology, links: price an all-gather, by the engine of the links.
        group: of the ranks that gather. The slots of a node share its port.

    **Raises:** PlanError for a profile of other variables, or without times.
    """
    rows = profile.variables[::-1]
    ours, theirs = [tuple(one.shape) for one in weights], [row.shape for row in rows]
    if ours != theirs or not profile.timed:
        differs = next(
            (pair for pair in itertools.zip_longest(ours, theirs) if pair[0] != pair[1]), None
        )
        raise PlanError(
            'pull="batched" needs a profile of this model with times. Received one of '
            f"{profile.model!r} "
            + (f"with {differs[1]} where the model has {differs[0]}." if differs else "of sizes.")
            + " Measure the model with `tfcommx profile` or cx.profile."
        )
    ranks = len(topology.group(group, 0))
    entry_bytes = [
        2 if "16" in str(one.dtype) else 8 if "64" in str(one.dtype) else 4 for one in weights
    ]
    own = [sum(rows[i].size * entry_bytes[i] for i in range(*layer)) / ranks for layer in layers]
    startup_s, per_byte = _line(sum(own), group, topology, links)
    return PullTimes(
        startup_s,
        tuple(per_byte * size for size in own),
        tuple(sum(rows[i].forward_s for i in range(*layer)) for layer in layers),
    )


def _line(own_bytes: float, group: str, topology: Topology, links: Links) -> tuple[float, float]:
    """Return start-up time and seconds per byte of gathers of half as many bytes to as many.

    The paper's methods need a line, and an engine's price has another one where it takes another
    algorithm for short vectors.
    """
    half, whole = (
        engines.gather_seconds(share * own_bytes, group, topology, links) for share in (0.5, 1.0)
    )
    startup_s = max(2 * half - whole, 0.0)
    return startup_s, (whole - startup_s) / own_bytes if own_bytes else 0.0
