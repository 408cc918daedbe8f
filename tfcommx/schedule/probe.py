"""Measure the links of the cluster that this runs on: alpha and beta by least squares over message sizes, gamma by adding.

An all-gather of s bytes from each of p ranks is priced at log2(p) alpha + (p - 1) s beta (`cost.all_gather`); times of several
sizes give alpha and beta. Among peers all slots of a node gather at once and share its port, so there s is the node's bytes.
What a collective's engine needs besides (Horovod's cycle, waking its thread) is in alpha: it is paid per collective, too.

Source: the alpha-beta model of Thakur et al., "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfcommx.comm import Comm
from tfcommx.terms import NOMINAL, Link, Links, PlanError

SIZES = tuple(4**power for power in range(5, 13))  # bytes from each rank: 1 KB to 16 MB
SMALLEST_BETA = 1e-13  # seconds per byte: faster than any memory; noise must not make a link free


class Probed(NamedTuple):
    """What was measured, equal on all ranks."""

    links: Links
    points: dict[str, list[tuple[float, float, float]]]  # "inside", "between" -> (start-ups, bytes that come in, seconds)

    def to_json(self) -> str:
        """Write links and points as JSON. A kind of link that this cluster does not have has no points, and nominal values."""
        links = {kind: dataclasses.asdict(link) for kind, link in self.links._asdict().items()}
        return json.dumps({"links": links, "points": self.points}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Probed:
        """Read what `to_json` wrote."""
        read = json.loads(text)
        points = {kind: [tuple(point) for point in found] for kind, found in read["points"].items()}
        return Probed(Links(**{kind: Link(**link) for kind, link in read["links"].items()}), points)


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return alpha (s, >= 0) and beta (s per byte, > 0) of points (start-ups, bytes, seconds).

    Least squares of the relative error: a small message counts as much as a large one, or alpha would drown in beta's noise.

    **Raises:** PlanError for fewer than two sizes or times that are not positive.
    """
    starts, sizes, seconds = np.array(points, np.float64).reshape(-1, 3).T
    if len(set(sizes)) < 2 or (seconds <= 0).any():
        raise PlanError(f"A fit of alpha and beta needs times > 0 of two or more sizes. Received {list(points)}.")
    rows = np.stack([starts, sizes], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
    if alpha < 0:  # the best fit with no start-up at all
        alpha, beta = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if beta < SMALLEST_BETA:
        alpha, beta = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), SMALLEST_BETA
    return float(alpha), float(beta)


def probe(comm: Comm, sizes: Sequence[int] = SIZES, repeats: int = 5,
          clock: Callable[[], float] = time.perf_counter) -> Probed:
    """Measure this cluster's links.

    Args:
        sizes: bytes that each rank sends, multiples of 4, >= 4.
        repeats: of each size; the fastest counts, as the slower ones met something else. >= 1.
        clock: seconds from any start.

    Returns:
        The same on every rank: of each message the slowest rank's time.

    **Ranks:** all, outside of traced code, with equal arguments. **Cost:** (repeats + 1) all-gathers of each size and group.
    **Raises:** PlanError where the nodes have unequal numbers of slots.
    """
    topology = comm.topology
    topology.require_even("probing the links")
    points = {
        "inside": _time(comm, "node", sizes, repeats, 1, clock),
        "between": _time(comm, "peers", sizes, repeats, topology.slots, clock),
    }
    gamma = max(comm.gather_objects(_gamma(max(sizes), repeats, clock)))
    links = {kind: Link(*fit(found), gamma) if found else getattr(NOMINAL, kind) for kind, found in points.items()}
    return Probed(Links(**links), points)


def _time(comm: Comm, group: str, sizes: Sequence[int], repeats: int, together: int,
          clock: Callable[[], float]) -> list[tuple[float, float, float]]:
    """Return (start-ups, bytes that come in through one port, seconds) of all-gathers in a group; none in a group of one."""
    ranks = len(comm.members(group))
    if ranks == 1:
        return []
    found = []
    for size in sizes:
        tensor, seconds = tf.zeros([size // 4]), math.inf
        for turn in range(repeats + 1):
            comm.gather_objects(None)  # all start together
            start = clock()
            comm.all_gather(tensor, group, f"tfcommx/probe/{group}/{size}").numpy()
            slowest = max(comm.gather_objects(clock() - start))
            seconds = min(seconds, slowest) if turn else math.inf  # the first one makes connections
        found.append((math.log2(ranks), float((ranks - 1) * size * together), seconds))
    return found


def _gamma(size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds per byte of adding one vector to another."""
    total, other, best = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32), math.inf
    for _ in range(repeats):
        start = clock()
        np.add(total, other, out=total)
        best = min(best, clock() - start)
    return max(best, 0.0) / (4 * len(total))
