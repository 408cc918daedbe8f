"""Measures the links of the cluster that this runs on: alpha and beta by messages, gamma by adding.

Under MPI each rank sends s bytes to the next one of its group while it receives as many: alpha + s
beta. Otherwise the engine gathers s bytes from each of p ranks, priced at log2(p) alpha + (p - 1) s
beta (`cost.all_gather`), and what it needs besides. Times of several sizes give alpha and beta.
Among peers all slots of a node send at once and share its port, so there s is the node's bytes.
What the engine needs besides, and what a message takes while the ranks compute: `measure.engine`.

Source: the alpha-beta model of Thakur et al., "Optimization of Collective Communication Operations
in MPICH" (2005).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.measure.engine import Turns, contention_of, engine_fuses, engine_of
from tfcommx.measure.fit import fit
from tfcommx.routes import pipeline
from tfcommx.routes.messages import MessageOptions, tag_of
from tfcommx.terms import NOMINAL, Bucket, Link, Links

# Bytes from each rank: 1 KB to 16 MB.
SIZES = tuple(4**power for power in range(5, 13))
# Bytes of the pipeline's blocks that are tried.
BLOCKS = (16384, 32768, 49152, 65536, 131072, 262144)
# Messages are repeated until this many bytes have come through the port, at most MOST of them:
# traffic shapers let a burst pass.
STEADY, MOST = 2**22, 16


class Probed(NamedTuple):
    """What was measured, equal on all ranks."""

    links: Links
    # "inside", "between" -> (latency terms, bytes that come in, seconds).
    points: dict[str, list[tuple[float, float, float]]]
    # (bytes of a block, seconds of the pipeline); empty if messages are not possible.
    blocks: list[tuple[int, float]]
    # Standard deviation of what was measured, over the turns: "inside.alpha_s", "contention", ...
    spread: dict[str, float] = {}  # noqa: RUF012  Nobody changes it
    # Did the engine carry out what was timed? Then its time is in the points.
    by_engine: bool = False

    def to_json(self) -> str:
        """Write all as JSON.

        A kind of link that this cluster does not have has no points, and nominal values.
        """
        found = {**self._asdict(), "links": self.links.to_dict()}
        return json.dumps(found, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Probed:
        """Read what `to_json` wrote."""
        read = json.loads(text)
        points = {kind: [tuple(point) for point in found] for kind, found in read["points"].items()}
        blocks = [tuple(row) for row in read["blocks"]]
        more = (read.get("spread", {}), read.get("by_engine", False))
        return Probed(Links.from_dict(read["links"]), points, blocks, *more)


def probe(
    comm: Comm,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    blocks: Sequence[int] = BLOCKS,
    steady: int = STEADY,
    load: Callable[[], object] | None = None,
    fusion: bool = False,
) -> Probed:
    """Measure this cluster's links; if messages are possible, tune the pipeline's blocks to them.

    Args:
        comm: this rank's view of the others.
        sizes: bytes that each rank sends, multiples of 4, >= 4.
        repeats: of each size; the fastest counts, because the slower ones were disturbed; of the
            engine's time and of contention, which are disturbances themselves, the median. >= 1.
        clock: seconds from any start.
        blocks: bytes of a block of the pipeline, multiples of 4, >= 4; tried on a vector of half
            the largest of `sizes`.
        steady: messages are repeated until so many bytes have come through a port.
        load: computes while messages are timed again (`measure.engine.multiply`, or a step of a
            model); None: contention is not measured.
        fusion: whether to try if the engine fuses allreduces; the library must work in graphs.

    Returns:
        The same on every rank: of each message the slowest rank's time.

    **Ranks:** all, outside of traced code, with equal arguments. **Cost:** (repeats + 1) times 1 to
    16 exchanges of each size and group, small ones more often, and (repeats + 1) allreduces for
    each size of block.
    **Raises:** PlanError if the nodes have unequal numbers of slots.
    """
    topology = comm.topology
    topology.require_even("probing the links")
    turns = functools.partial(_turns, comm, repeats=repeats, clock=clock)
    gamma = max(comm.gather_objects(_gamma(max(sizes), repeats, clock)))
    found: dict[str, Any] = {}
    points: dict[str, list[tuple[float, float, float]]] = {}
    spread: dict[str, float] = {}
    for kind, group, together in (("inside", "node", 1), ("between", "peers", topology.slots)):
        timed = _time(comm, group, sizes, together, turns, steady)
        points[kind] = [(terms, size, min(times)) for terms, size, times in timed]
        if not timed:
            found[kind] = getattr(NOMINAL, kind)
            continue
        alpha, beta = fit(points[kind])
        engine = engine_of(comm, group, alpha, turns)
        found |= {
            kind: Link(engine.alpha_s, beta, gamma),
            # Between nodes, if there are several
            "engine_s": statistics.median(engine.seconds),
        }
        spread |= {**_spread(kind, timed), "engine_s": statistics.pstdev(engine.seconds)}
    if topology.size > 1:
        found |= _under_load(comm, sizes, load, turns, spread)
        found["fuses"] = fusion and engine_fuses(comm, turns)
    tried = _time_blocks(comm, max(sizes) // 8, blocks, turns)
    best = min(tried, key=lambda row: row[1])[0] if tried else NOMINAL.block_bytes
    by_engine = not comm.has_messages
    return Probed(Links(**found, block_bytes=best), points, tried, spread, by_engine)


def _spread(kind: str, timed: list[tuple[float, float, list[float]]]) -> dict[str, float]:
    """Return the standard deviations of alpha and beta, each turn fitted by itself.

    The alphas have the engine's time in them where the engine sends what is timed.
    """
    turns = range(len(timed[0][2]))
    fits = [fit([(terms, size, times[turn]) for terms, size, times in timed]) for turn in turns]
    alphas, betas = zip(*fits, strict=True)
    return {
        f"{kind}.alpha_s": statistics.pstdev(alphas),
        f"{kind}.beta_s_per_byte": statistics.pstdev(betas),
    }


def _under_load(
    comm: Comm,
    sizes: Sequence[int],
    load: Callable[[], object] | None,
    turns: Turns,
    spread: dict[str, float],
) -> dict[str, float]:
    """Time a message of a middle size again while all ranks compute; nothing without a load."""
    if load is None:
        return {}
    size = sorted(sizes)[len(sizes) // 2]
    group = "peers" if comm.topology.nodes > 1 else "node"
    with _exchange(comm, group) as exchange:
        work = functools.partial(exchange, size // 4, f"tfcommx/probe/load/{size}", 1)
        found = contention_of(work, load, turns)
    spread["contention"] = statistics.pstdev(found)
    return {"contention": statistics.median(found)}


def _time(
    comm: Comm, group: str, sizes: Sequence[int], together: int, turns: Turns, steady: int
) -> list[tuple[float, float, list[float]]]:
    """Time exchanges in a group; a group of one has none.

    Returns:
        (latency terms, bytes that come in through one port, seconds of each turn) of each size.
    """
    members = comm.members(group)
    if len(members) == 1:
        return []
    latencies, parts = math.log2(len(members)), len(members) - 1
    if comm.has_messages:
        latencies, parts = 1.0, 1
    points = []
    with _exchange(comm, group) as exchange:
        for size in sizes:
            through = parts * size * together
            times = min(MOST, max(1, steady // through))
            work = functools.partial(exchange, size // 4, f"tfcommx/probe/{group}/{size}", times)
            points.append((latencies, float(through), [one / times for one in turns(work)]))
    return points


@contextlib.contextmanager
def _exchange(comm: Comm, group: str) -> Iterator[Callable[[int, str, int], None]]:
    """Make what sends so many entries around a group, some times. **Ranks:** all."""
    members = comm.members(group)
    # Its own: a route's messages would change how a rank ends after an exception
    point_to_point = comm.open_own_messages(counted=False) if comm.has_messages else None
    position = members.index(comm.rank)

    def exchange(entries: int, name: str, times: int) -> None:
        for _ in range(times):
            once(entries, name)

    def once(entries: int, name: str) -> None:
        if point_to_point is None:
            comm.all_gather(tf.zeros([entries]), group, name, counted=False)
            return
        after, before = members[(position + 1) % len(members)], members[position - 1]
        requests = [
            point_to_point.receive(np.empty(entries, np.float32), before, tag_of(name)),
            point_to_point.send(np.zeros(entries, np.float32), after, tag_of(name)),
        ]
        while requests:
            requests.pop(point_to_point.wait_any(requests))

    yield exchange
    if point_to_point is not None:  # After an exception the others may not come
        point_to_point.close()


def _time_blocks(
    comm: Comm, entries: int, blocks: Sequence[int], turns: Turns
) -> list[tuple[int, float]]:
    """Time the pipeline's allreduce with each size of block; nothing if it cannot run.

    Returns:
        (bytes of a block, seconds) of each.
    """
    if not blocks or not comm.has_messages or comm.topology.size == 1:
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
        found.append((block, min(turns(work))))
    return found


def _turns(
    comm: Comm, work: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Return the seconds of the slowest rank in each of `repeats` turns."""
    seconds = []
    for _ in range(repeats + 1):
        comm.gather_objects(None)  # All start together
        start = clock()
        work()
        seconds.append(max(comm.gather_objects(clock() - start)))
    return seconds[1:]  # The first one makes connections


def _gamma(size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds per byte of adding one vector to another."""
    total, other, best = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32), math.inf
    for _ in range(repeats):
        start = clock()
        np.add(total, other, out=total)
        best = min(best, clock() - start)
    return max(best, 0.0) / (4 * len(total))
