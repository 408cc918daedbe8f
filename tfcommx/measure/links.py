"""Measures the links of the cluster that this runs on: alpha and beta by messages, gamma by adding.

Under MPI each rank sends s bytes to the next one of its group while it receives as many: alpha + s
beta. Otherwise the engine gathers s bytes from each of p ranks, priced at log2(p) alpha + (p - 1) s
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
from tfcommx.measure.fit import fit
from tfcommx.routes import pipeline
from tfcommx.routes.messages import MessageOptions, tag_of
from tfcommx.terms import NOMINAL, Bucket, Link, Links

# Bytes from each rank: 1 KB to 16 MB.
SIZES = tuple(4**power for power in range(5, 13))
# Bytes of the pipeline's blocks that are tried.
BLOCKS = (16384, 32768, 49152, 65536, 131072, 262144)
# Messages are repeated until STEADY bytes have come through the port, at most MOST of them:
# traffic shapers let a burst pass.
STEADY, MOST = 2**22, 16


class Probed(NamedTuple):
    """What was measured, equal on all ranks."""

    links: Links
    # "inside", "between" -> (latency terms, bytes that come in, seconds).
    points: dict[str, list[tuple[float, float, float]]]
    # (bytes of a block, seconds of the pipeline); empty if messages are not possible.
    blocks: list[tuple[int, float]]

    def to_json(self) -> str:
        """Write all as JSON.

        A kind of link that this cluster does not have has no points, and nominal values.
        """
        found = {"links": self.links.to_dict(), "points": self.points, "blocks": self.blocks}
        return json.dumps(found, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Probed:
        """Read what `to_json` wrote."""
        read = json.loads(text)
        points = {kind: [tuple(point) for point in found] for kind, found in read["points"].items()}
        return Probed(
            Links.from_dict(read["links"]), points, [tuple(row) for row in read["blocks"]]
        )


def probe(
    comm: Comm,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    blocks: Sequence[int] = BLOCKS,
    steady: int = STEADY,
) -> Probed:
    """Measure this cluster's links; if messages are possible, tune the pipeline's blocks to them.

    Args:
        comm: this rank's view of the others.
        sizes: bytes that each rank sends, multiples of 4, >= 4.
        repeats: of each size; the fastest counts, because the slower ones were disturbed. >= 1.
        clock: seconds from any start.
        blocks: bytes of a block of the pipeline, multiples of 4, >= 4; tried on a vector of half
            the largest of `sizes`.
        steady: messages are repeated until so many bytes have come through a port.

    Returns:
        The same on every rank: of each message the slowest rank's time.

    **Ranks:** all, outside of traced code, with equal arguments. **Cost:** (repeats + 1) times 1 to
    16 exchanges of each size and group, small ones more often, and (repeats + 1) allreduces for
    each size of block.
    **Raises:** PlanError if the nodes have unequal numbers of slots.
    """
    topology = comm.topology
    topology.require_even("probing the links")
    points = {
        "inside": _time(comm, "node", sizes, repeats, 1, clock, steady),
        "between": _time(comm, "peers", sizes, repeats, topology.slots, clock, steady),
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
    steady: int,
) -> list[tuple[float, float, float]]:
    """Time exchanges in a group; a group of one has none.

    Returns:
        (latency terms, bytes that come in through one port, seconds) of each size.
    """
    members = comm.members(group)
    if len(members) == 1:
        return []
    latencies, parts = math.log2(len(members)), len(members) - 1
    if comm.has_messages:
        point_to_point, latencies, parts = comm.open_point_to_point(), 1.0, 1
    position = members.index(comm.rank)

    def exchange(entries: int, name: str, times: int) -> None:
        for _ in range(times):
            once(entries, name)

    def once(entries: int, name: str) -> None:
        if not comm.has_messages:
            comm.all_gather(tf.zeros([entries]), group, name, counted=False)
            return
        after, before = members[(position + 1) % len(members)], members[position - 1]
        requests = [
            point_to_point.receive(np.empty(entries, np.float32), before, tag_of(name)),
            point_to_point.send(np.zeros(entries, np.float32), after, tag_of(name)),
        ]
        while requests:
            requests.pop(point_to_point.wait_any(requests))

    points = []
    for size in sizes:
        through = parts * size * together
        times = min(MOST, max(1, steady // through))
        work = functools.partial(exchange, size // 4, f"tfcommx/probe/{group}/{size}", times)
        points.append((latencies, float(through), _fastest(comm, work, repeats, clock) / times))
    return points


def _time_blocks(
    comm: Comm, entries: int, blocks: Sequence[int], repeats: int, clock: Callable[[], float]
) -> list[tuple[int, float]]:
    """Time the pipeline's allreduce with each size of block; nothing if it cannot run.

    Returns:
        (bytes of a block, seconds) of each.
    """
    if not comm.has_messages or comm.topology.size == 1:
        return []
    comm.open_point_to_point()
    vector, found = tf.zeros([entries]), []
    for block in blocks:
        bucket = Bucket(
            f"tfcommx/probe/blocks/{block}",
            (),
            (entries,),
            "float32",
            pipeline.ROUTE.name,
            options=MessageOptions(block),
        )
        work = functools.partial(pipeline.ROUTE.run_in_group, vector, bucket, comm, "world")
        found.append((block, _fastest(comm, work, repeats, clock)))
    return found


def _fastest(
    comm: Comm, work: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> float:
    """Return the seconds of the slowest rank, in the fastest of `repeats` turns."""
    seconds = math.inf
    for turn in range(repeats + 1):
        comm.gather_objects(None)  # All start together
        start = clock()
        work()
        slowest = max(comm.gather_objects(clock() - start))
        seconds = min(seconds, slowest) if turn else math.inf  # The first one makes connections
    return seconds


def _gamma(size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds per byte of adding one vector to another."""
    total, other, best = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32), math.inf
    for _ in range(repeats):
        start = clock()
        np.add(total, other, out=total)
        best = min(best, clock() - start)
    return max(best, 0.0) / (4 * len(total))
