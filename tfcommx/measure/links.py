"""Measure the links of the cluster that this runs on: alpha and beta by least squares over message
sizes, gamma by adding.

Under MPI each rank sends s bytes to the next one of its group while it receives as many: alpha + s
beta. Elsewhere the engine gathers s bytes from each of p ranks, priced at log2(p) alpha + (p - 1) s
beta (`cost.all_gather`); what it needs besides (Horovod's cycle, waking its thread) is then in
alpha: it is paid per collective, too. Times of several sizes give alpha and beta. Among peers all
slots of a node send at once and share its port, so there s is the node's bytes.

Source: the alpha-beta model of Thakur et al., "Optimization of Collective Communication Operations
in MPICH" (2005).
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.routes import moves, pipeline
from tfcommx.terms import NOMINAL, Bucket, Link, Links, PlanError

SIZES = tuple(4**power for power in range(5, 13))  # bytes from each rank: 1 KB to 16 MB
# bytes of the pipeline's blocks that are tried
BLOCKS = (16384, 32768, 49152, 65536, 131072, 262144)
# messages go in a row until so many bytes have come through the port, at most MOST: shapers let a
# burst pass
STEADY, MOST = 2**22, 16
SMALLEST_BETA = 1e-13  # seconds per byte: faster than any memory; noise must not make a link free


class Probed(NamedTuple):
    """What was measured, equal on all ranks."""

    links: Links
    # "inside", "between" -> (start-ups, bytes that come in, seconds)
    points: dict[str, list[tuple[float, float, float]]]
    # (bytes of a block, seconds of the pipeline); empty where messages are not possible
    blocks: list[tuple[int, float]]

    def to_json(self) -> str:
        """Write all as JSON. A kind of link that this cluster does not have has no points, and
        nominal values.
        """
        return (
            json.dumps(
                {"links": self.links.to_dict(), "points": self.points, "blocks": self.blocks},
                indent=1,
            )
            + "\n"
        )

    @staticmethod
    def from_json(text: str) -> Probed:
        """Read what `to_json` wrote."""
        read = json.loads(text)
        points = {kind: [tuple(point) for point in found] for kind, found in read["points"].items()}
        return Probed(
            Links.from_dict(read["links"]), points, [tuple(row) for row in read["blocks"]]
        )


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return alpha (s, >= 0) and beta (s per byte, > 0) of points (start-ups, bytes, seconds).

    Least squares of the relative error: a small message counts as much as a large one, or alpha
    would drown in beta's noise.

    **Raises:** PlanError for fewer than two sizes or times that are not positive.
    """
    starts, sizes, seconds = np.array(points, np.float64).reshape(-1, 3).T
    if len(set(sizes)) < 2 or (seconds <= 0).any():
        raise PlanError(
            "A fit of alpha and beta needs times > 0 of two or more sizes. Received "
            f"{list(points)}."
        )
    rows = np.stack([starts, sizes], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
    if alpha < 0:  # the best fit with no start-up at all
        alpha, beta = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if beta < SMALLEST_BETA:
        alpha, beta = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), SMALLEST_BETA
    return float(alpha), float(beta)


def probe(
    comm: Comm,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    blocks: Sequence[int] = BLOCKS,
) -> Probed:
    """Measure this cluster's links; where messages are possible, tune the pipeline's blocks to
    them.

    Args:
        sizes: bytes that each rank sends, multiples of 4, >= 4.
        repeats: of each size; the fastest counts, as the slower ones met something else. >= 1.
        clock: seconds from any start.
        blocks: bytes of a block of the pipeline, multiples of 4, >= 4; tried on a vector of half
            the largest of `sizes`.

    Returns:
        The same on every rank: of each message the slowest rank's time.

    **Ranks:** all, outside of traced code, with equal arguments. **Cost:** (repeats + 1) times 1 to
    16 exchanges of each size and group, small ones more often, and (repeats + 1) allreduces for
    each size of block.
    **Raises:** PlanError where the nodes have unequal numbers of slots.
    """
    topology = comm.topology
    topology.require_even("probing the links")
    points = {
        "inside": _time(comm, "node", sizes, repeats, 1, clock),
        "between": _time(comm, "peers", sizes, repeats, topology.slots, clock),
    }
    gamma = max(comm.gather_objects(_gamma(max(sizes), repeats, clock)))
    links = {
        kind: Link(*fit(found), gamma) if found else getattr(NOMINAL, kind)
        for kind, found in points.items()
    }
    tried = _time_blocks(comm, max(sizes) // 8, blocks, repeats, clock)
    best = min(tried, key=lambda row: row[1])[0] if tried else NOMINAL.block_bytes
    return Probed(Links(**links, block_bytes=best), points, tried)


def _time(
    comm: Comm,
    group: str,
    sizes: Sequence[int],
    repeats: int,
    together: int,
    clock: Callable[[], float],
) -> list[tuple[float, float, float]]:
    """Return (start-ups, bytes that come in through one port, seconds) of exchanges in a group;
    none in a group of one.
    """
    members = comm.members(group)
    if len(members) == 1:
        return []
    place, starts, parts = members.index(comm.rank), math.log2(len(members)), len(members) - 1
    if comm.has_messages:
        post, starts, parts = comm.open_point_to_point(), 1.0, 1

    def exchange(entries: int, name: str, times: int) -> None:
        for _ in range(times):
            once(entries, name)

    def once(entries: int, name: str) -> None:
        if not comm.has_messages:
            comm.all_gather(tf.zeros([entries]), group, name)
            return
        tag, after, before = (
            moves.tag_of(name),
            members[(place + 1) % len(members)],
            members[place - 1],
        )
        requests = [
            post.receive(np.empty(entries, np.float32), before, tag),
            post.send(np.zeros(entries, np.float32), after, tag),
        ]
        while requests:
            requests.pop(post.wait_any(requests))

    points = []
    for size in sizes:
        through = parts * size * together
        times = min(MOST, max(1, STEADY // through))
        work = functools.partial(exchange, size // 4, f"tfcommx/probe/{group}/{size}", times)
        points.append((starts, float(through), _fastest(comm, work, repeats, clock) / times))
    return points


def _time_blocks(
    comm: Comm, entries: int, blocks: Sequence[int], repeats: int, clock: Callable[[], float]
) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of the pipeline's allreduce for each size of block; nothing where it
    cannot run.
    """
    if not comm.has_messages or comm.topology.size == 1:
        return []
    comm.open_point_to_point()
    vector = tf.zeros([entries])
    buckets = [
        Bucket(
            f"tfcommx/probe/blocks/{block}",
            (),
            (entries,),
            "float32",
            "pipeline",
            block_bytes=block,
        )
        for block in blocks
    ]
    return [
        (
            bucket.block_bytes,
            _fastest(comm, functools.partial(pipeline.run, vector, bucket, comm), repeats, clock),
        )
        for bucket in buckets
    ]


def _fastest(
    comm: Comm, work: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> float:
    """Return the seconds of the slowest rank, in the fastest of `repeats` turns."""
    seconds = math.inf
    for turn in range(repeats + 1):
        comm.gather_objects(None)  # all start together
        start = clock()
        work()
        slowest = max(comm.gather_objects(clock() - start))
        seconds = min(seconds, slowest) if turn else math.inf  # the first one makes connections
    return seconds


def _gamma(size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds per byte of adding one vector to another."""
    total, other, best = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32), math.inf
    for _ in range(repeats):
        start = clock()
        np.add(total, other, out=total)
        best = min(best, clock() - start)
    return max(best, 0.0) / (4 * len(total))
