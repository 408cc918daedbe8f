"""Measure the links of this cluster: alpha and beta by messages, gamma by adding.

Under MPI each rank sends s bytes to the next rank of its group while it receives as many: alpha + s
beta. Under Gloo and NCCL, the engine gathers s bytes from each of p ranks in a ring: (p - 1)
(alpha + s beta), plus its own time. For NCCL they are in the GPU's memory, because the host's
messages take another path. Alpha and beta are fitted to the times of several sizes. Among peers, s
is the bytes of the node, because all its slots send at once and share its port. `seconds_per_byte`
adds on the device of the residuals, because routes add there. `measure.engine` measures the
engine's own time, messages while the ranks compute, and the real times of the engine's short
allreduces of all ranks.

Source: the alpha-beta model of Thakur et al., "Optimization of Collective Communication Operations
in MPICH" (2005).
"""

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

from tfcommx.collectives.comm import Comm
from tfcommx.core import NOMINAL, Bucket, EngineSettings, Link, Links
from tfcommx.core.links import fit
from tfcommx.kernels.device import residual_device
from tfcommx.measure.engine import (
    Timer,
    calibrate,
    engine_at_work,
    engine_fuses,
    finish,
    measure_contention,
    measure_engine,
    repetitions,
    sends_messages,
    typical_seconds,
    where_carried,
)
from tfcommx.routes import pipeline
from tfcommx.routes.messages import MessageOptions, tag_of

# Bytes of a vector on a GPU; the time of shorter ones is that of a launch
BYTES_ON_GPU = 2**24
# Number of additions timed together; launch and copy to the host would hide the time of one
ADDITIONS = 32


def seconds_per_byte(
    device: str, size: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds per byte of adding one vector to another.

    Args:
        device: "/cpu:0", or TensorFlow's name of a GPU.
        size: bytes of the vectors on the CPU, a multiple of 4, >= 4.
        repeats: number of additions, >= 1.

    **Ranks:** local. **Cost:** `repeats` additions, or on a GPU `repeats` + 1 times 34, and 32 MB
    of its memory.
    """
    if device != "/cpu:0":
        return on_device(device, BYTES_ON_GPU, repeats, clock)
    total, summand, best = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32), math.inf
    for _ in range(repeats):
        # In place, because a new result would be timed with its page faults
        start = clock()
        np.add(total, summand, out=total)
        # The fastest, because other work makes an addition slower, never faster
        best = min(best, clock() - start)
    return max(best, 0.0) / (4 * len(total))


def on_device(device: str, size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds per byte of TensorFlow's addition on a device.

    They are the difference of a row of additions and a single one.

    Args:
        device: TensorFlow's name of the device.
        size: bytes of the vectors, a multiple of 4, >= 4.
    """
    with tf.device(device):
        total, summand = tf.Variable(tf.zeros([size // 4])), tf.ones([size // 4])

    def row(additions: int) -> Callable[[], tf.Tensor]:
        def add() -> tf.Tensor:
            with tf.device(device):
                for _ in range(additions):  # In place, and therefore in sequence
                    total.assign_add(summand)
                # An entry, which the host reads, because a launch ends before the addition does
                return total.read_value()[:1]

        traced: Callable[[], tf.Tensor] = tf.function(add, autograph=False)
        return traced

    long, short = row(1 + ADDITIONS), row(1)
    # The launch and the copy to the host cancel, because both rows have them
    difference = typical_seconds(lambda: long().numpy(), repeats, clock)
    difference -= typical_seconds(lambda: short().numpy(), repeats, clock)
    return max(difference, 0.0) / (ADDITIONS * size)


# Bytes from each rank: 1 KB to 16 MB
SIZES = tuple(4**power for power in range(5, 13))
# Sizes of the pipeline's blocks to try, bytes
BLOCKS = (16384, 32768, 49152, 65536, 131072, 262144)
# Messages and the longest allreduce are repeated, at most MOST times, until this many bytes have
# passed through the port, because traffic shapers pass a burst
STEADY = 2**22
# Messages that detect a change of the network: bytes of each, bytes through a port per measured
# time, and number of times. While other programs compute on the ranks' processors, half of the
# times are twice as long as the fastest.
WATCHED, WATCHED_STEADY, WATCHED_TIMES = 2**18, 2**20, 8
# Bytes of the measured allreduces, limited to the largest requested size
CURVE = (1024, 16384, 65536, 262144, 2**20, 2**22)


class ProbeResult(NamedTuple):
    """Measured links, equal on all ranks."""

    links: Links
    # "inside", "between" -> (latency terms, received bytes, seconds)
    points: dict[str, list[tuple[float, float, float]]]
    # (bytes of a block, seconds of the pipeline); empty without messages
    blocks: list[tuple[int, float]]
    # Standard deviations over the repeats: "inside.alpha_s", "contention", ...
    spread: dict[str, float] = {}  # noqa: RUF012  Never changed
    # True if the engine ran the messages; then the points include its time
    by_engine: bool = False

    def to_json(self) -> str:
        """Return JSON; a kind of link that this cluster lacks has nominal values and no points."""
        fields = {**self._asdict(), "links": self.links.to_dict()}
        return json.dumps(fields, indent=1) + "\n"


def probe(
    comm: Comm,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    blocks: Sequence[int] = BLOCKS,
    steady: int = STEADY,
    load: Callable[[], object] | None = None,
    fusion: bool = False,
) -> ProbeResult:
    """Measure this cluster's links, and with messages the best size of the pipeline's blocks.

    Args:
        sizes: bytes that each rank sends, multiples of 4, >= 4.
        repeats: repeats of each size, >= 1. The median of messages and allreduces counts; for
            blocks and additions, the fastest.
        blocks: bytes of the pipeline's blocks to try, multiples of 4, >= 4; the vector has half the
            bytes of the largest of `sizes`.
        steady: messages and the longest allreduce are repeated until this many bytes have passed
            through a port, at most MOST times.
        load: computes while messages are timed again (`measure.engine.matmul_load`, or a step of a
            model); None: contention is not measured.
        fusion: True to measure if the engine fuses allreduces; `comm` must work in graphs.

    Returns:
        The same on every rank; times of messages are those of the slowest rank.

    **Ranks:** all, outside of traced code, with equal arguments. **Cost:** (repeats + 1) times 1 to
    16 exchanges of each size and group and of the longest allreduce, 20 tiny collectives a group,
    an allreduce and an all-gather of each size of the curve, and an allreduce for each block.
    **Raises:** ConfigurationError if the nodes have unequal numbers of slots.
    """
    topology = comm.topology
    topology.require_even("probing the links")
    timer = functools.partial(_slowest_seconds, comm, repeats=repeats, clock=clock)
    added = seconds_per_byte(residual_device(), max(sizes), repeats, clock)
    gamma = max(comm.gather_objects(added))  # The other ranks wait for the slowest one
    fields: dict[str, Any] = {}
    points: dict[str, list[tuple[float, float, float]]] = {}
    spread: dict[str, float] = {}
    for kind, group, together in (("inside", "node", 1), ("between", "peers", topology.slots)):
        timed = _time(comm, group, sizes, together, timer, steady)
        # Not the fastest, because disturbances of the probe also occur in training
        points[kind] = [(terms, size, statistics.median(times)) for terms, size, times in timed]
        if not timed:
            fields[kind] = getattr(NOMINAL, kind)
            continue
        alpha, beta = fit(points[kind])
        engine = measure_engine(comm, group, alpha, timer)
        fields |= {
            kind: Link(engine.alpha_s, beta, gamma),
            # The last kind counts: between nodes, if the cluster has several
            "engine_s": statistics.median(engine.seconds),
        }
        spread |= {**_spread(kind, timed), "engine_s": statistics.pstdev(engine.seconds)}
    if topology.size > 1:
        fields |= _under_load(comm, sizes, load, timer, spread)
        fields["fuses"] = fusion and engine_fuses(comm, timer)
        fields["engine"] = EngineSettings(engine_at_work(comm))
        curve = [size for size in CURVE if size <= max(sizes)]
        if len(curve) > 1:
            fields["calibration"] = calibrate(comm, curve, fields["engine_s"], steady, timer)
        port = "between" if topology.nodes > 1 else "inside"
        fields["spread"] = spread[f"{port}.beta_s_per_byte"] / fields[port].beta_s_per_byte
    tried = _time_blocks(comm, max(sizes) // 8, blocks, timer)
    best = min(tried, key=lambda row: row[1])[0] if tried else NOMINAL.block_bytes
    by_engine = not sends_messages(comm)
    return ProbeResult(Links(**fields, block_bytes=best), points, tried, spread, by_engine)


def fastest_message(comm: Comm) -> float:
    """Return the seconds of the fastest of several messages of WATCHED bytes between nodes.

    Args:
        comm: this rank's view of the others, on two nodes or more.

    **Ranks:** all, outside of traced code. **Cost:** 9 MB through each port, or 9 messages if
    they have more bytes.
    **Raises:** ConfigurationError if the nodes have unequal numbers of slots.
    """
    comm.topology.require_even("measuring messages between nodes")
    timer = functools.partial(
        _slowest_seconds, comm, repeats=WATCHED_TIMES, clock=time.perf_counter
    )
    slots = comm.topology.slots
    (row,) = _time(comm, "peers", [WATCHED], slots, timer, WATCHED_STEADY)
    # Not the median, because a slower network lengthens all messages, and other work on a machine
    # only some, up to 30 times if it takes a processor from a rank
    return min(row[2])


def _spread(kind: str, timed: list[tuple[float, float, list[float]]]) -> dict[str, float]:
    """Return the standard deviations of alpha and beta, fitted to each repeat separately."""
    fits = [
        fit([(terms, size, times[repeat]) for terms, size, times in timed])
        for repeat in range(len(timed[0][2]))
    ]
    alphas, betas = zip(*fits, strict=True)
    return {
        f"{kind}.alpha_s": statistics.pstdev(alphas),
        f"{kind}.beta_s_per_byte": statistics.pstdev(betas),
    }


def _under_load(
    comm: Comm,
    sizes: Sequence[int],
    load: Callable[[], object] | None,
    timer: Timer,
    spread: dict[str, float],
) -> dict[str, float]:
    if load is None:
        return {}
    size = sorted(sizes)[len(sizes) // 2]
    group = "peers" if comm.topology.nodes > 1 else "node"
    with _exchange(comm, group) as exchange:
        work = functools.partial(exchange, size // 4, f"tfcommx/probe/load/{size}", 1)
        slowdowns = measure_contention(work, load, timer)
    spread["contention"] = statistics.pstdev(slowdowns)
    return {"contention": statistics.median(slowdowns)}


def _time(
    comm: Comm, group: str, sizes: Sequence[int], together: int, timer: Timer, steady: int
) -> list[tuple[float, float, list[float]]]:
    """Return (latency terms, bytes received through one port, seconds of each repeat) by size."""
    members = comm.members(group)
    if len(members) == 1:
        return []
    latencies, parts = float(len(members) - 1), len(members) - 1
    if sends_messages(comm):
        latencies, parts = 1.0, 1
    points = []
    with _exchange(comm, group) as exchange:
        for size in sizes:
            through = parts * size * together
            times = repetitions(steady, through)
            work = functools.partial(exchange, size // 4, f"tfcommx/probe/{group}/{size}", times)
            points.append((latencies, float(through), [time_s / times for time_s in timer(work)]))
    return points


@contextlib.contextmanager
def _exchange(comm: Comm, group: str) -> Iterator[Callable[[int, str, int], object]]:
    """Yield a function that sends entries around a group several times. **Ranks:** all."""
    members = comm.members(group)
    # A separate connection, because a route's would change the exit of a rank after an exception
    point_to_point = comm.messages.open_own(counted=False) if sends_messages(comm) else None
    position = members.index(comm.rank)

    def exchange(entries: int, name: str, times: int) -> object:
        return [once(entries, name) for _ in range(times)][-1]

    def once(entries: int, name: str) -> object:
        if point_to_point is None:
            with tf.device(where_carried(comm)):
                return comm.all_gather(tf.zeros([entries]), group, name, counted=False)
        after, before = members[(position + 1) % len(members)], members[position - 1]
        requests = [
            point_to_point.receive(np.empty(entries, np.float32), before, tag_of(name)),
            point_to_point.send(np.zeros(entries, np.float32), after, tag_of(name)),
        ]
        while requests:
            requests.pop(point_to_point.wait_any(requests))
        return None

    yield exchange
    if point_to_point is not None:  # Not after an exception; closing waits for the others
        point_to_point.close()


def _time_blocks(
    comm: Comm, entries: int, blocks: Sequence[int], timer: Timer
) -> list[tuple[int, float]]:
    """Return (bytes of a block, seconds of the pipeline's allreduce); empty if it cannot run."""
    if not blocks or not comm.messages.possible or comm.topology.size == 1:
        return []
    # Opened here, so that no block's time contains it
    comm.messages.open()
    vector, timed = tf.zeros([entries]), []
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
        timed.append((block, min(timer(work))))
    return timed


def _slowest_seconds(
    comm: Comm, work: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Return the seconds of work on the slowest rank, for each repeat."""
    seconds = []
    for _ in range(repeats + 1):
        comm.gather_objects(None)  # All start together
        start = clock()
        finish(work())
        seconds.append(max(comm.gather_objects(clock() - start)))
    return seconds[1:]  # Without the first, which opens connections
