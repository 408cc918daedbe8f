"""Measure costs of collectives besides alpha and beta: the engine's time, and the load's.

    tiny all-gather    | engine | (p - 1) alpha |
    tiny allreduce     | engine |      2 (p - 1) alpha      |

Every collective costs the engine's time and latency terms. The two are separated by collectives
with different numbers of terms. If messages are possible, alpha is measured without the engine's
time, and an allreduce has the terms of the engine's algorithm.
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfcommx import engines
from tfcommx.collectives.comm import Comm
from tfcommx.core import Calibration, Link, Links, Topology
from tfcommx.core.links import not_falling

# Repeats work on all ranks; returns the seconds of the slowest rank for each repeat
Timer = Callable[[Callable[[], object]], list[float]]

# Entries of vectors whose cost is almost only latency
TINY = 8
# Number of tiny collectives timed together
IN_A_ROW = 10
# Number of allreduces that wait for the engine at the same time
WAITING = 16
# Most exchanges that are timed in a row until a shaper's burst is used up
MOST = 16
# Rows of the square matrices whose product is the load
ROWS = 384


class EngineCost(NamedTuple):
    """Cost of a group's collectives, without their bytes."""

    # Seconds per latency term, >= 0
    alpha_s: float
    # Seconds of the engine for a collective, >= 0, for each repeat
    seconds: list[float]


def engine_at_work(comm: Comm) -> str:
    """Return the name of the engine that carries out Horovod's allreduces in this launch.

    On GPUs it is NCCL only if Horovod was built with it; otherwise they travel through the host.
    """
    if comm.by_nccl:
        return "nccl"
    return "open_mpi" if comm.messages.possible else "gloo"


def sends_messages(comm: Comm) -> bool:
    """Return True if messages between two ranks measure the time of a collective's bytes."""
    # NCCL sends over other wires, from the GPU's memory, and MPI's messages from the host's
    return comm.messages.possible and not comm.by_nccl


def where_carried(comm: Comm) -> str:
    """Return the device whose memory the collectives of gradients read."""
    return "/gpu:0" if comm.by_nccl else "/cpu:0"


def finish(result: Any) -> None:
    """Wait until the tensors of a nest exist.

    **Ranks:** local. **Cost:** on a GPU, a copy of one entry of each tensor to the host.
    """
    # Needed, because a GPU's op or collective may end once it is queued
    for part in tf.nest.flatten(result):
        if isinstance(part, tf.Tensor) and not _in_host_memory(part):
            tf.reshape(part, [-1])[:1].numpy()


def _in_host_memory(tensor: tf.Tensor) -> bool:
    return "GPU" not in tensor.device


def typical_seconds(
    work: Callable[[], object], repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median seconds of work, after a first call that traces. **Ranks:** local."""
    times = []
    for _ in range(repeats + 1):
        start = clock()
        work()
        times.append(clock() - start)
    # Not the fastest, because ranks that share cores also disturb each other in real steps, and a
    # GPU's clock may shorten single times
    return statistics.median(times[1:])


def latency_terms(engine: str, ranks: int, group: str) -> float:
    """Count the latency terms of a tiny allreduce in the engine's algorithm.

    >>> latency_terms("gloo", 4, "peers"), latency_terms("open_mpi", 4, "node")
    (6.0, 2.0)
    >>> round(latency_terms("nccl", 4, "node")), round(latency_terms("nccl", 4, "peers"))
    (6, 4)

    Args:
        engine: name in the table of `tfcommx.engines`.
        ranks: ranks of the group, >= 2.
        group: "node" or "peers"; NCCL's trees are chains inside a node.
    """
    # The price of a collective whose every term costs a second, and its bytes nothing
    unit = Link(1.0, 1e-30)
    topology = Topology(1, ranks) if group == "node" else Topology(ranks, 1)
    return engines.get(engine).all_reduce(4 * TINY, topology, Links(unit, unit))


def repetitions(steady: int, through: float) -> int:
    """Return how many exchanges in a row are timed, 1 to MOST, to send `steady` bytes.

    Args:
        steady: bytes through a port that exceed the burst of most traffic shapers.
        through: bytes of an exchange through a port, > 0.
    """
    return min(MOST, max(1, int(steady // through)))


def calibrate(
    comm: Comm, sizes: Sequence[int], engine_s: float, steady: int, timer: Timer
) -> Calibration:
    """Measure allreduces of all ranks and all-gathers of peers, without the engine's own time.

    None counts as shorter than its bytes take at the rate of the longest, which is repeated in a
    row, because a shaped port that was idle passes a burst. The earlier messages of a training step
    have used that up.

    Args:
        sizes: bytes of the vectors, ascending, multiples of 4, >= 4; an all-gather sends as many
            through each port between nodes.
        engine_s: seconds of the engine for each collective.
        steady: the longest is repeated until this many bytes have passed through a port.

    Where messages between two ranks are possible, they stand for all-gathers.

    **Ranks:** all. **Cost:** an allreduce and an all-gather of each size, and 1 to MOST of the
    longest allreduce, for each repeat.
    """
    ranks, measured = comm.topology.size, list[tuple[int, float]]()
    least, times = 0.0, repetitions(steady, 2 * (ranks - 1) / ranks * sizes[-1])
    # The longest first, because its rate bounds the times of the others
    for size in reversed(sizes):
        name = f"tfcommx/probe/allreduce/{size}"
        with tf.device(where_carried(comm)):
            vector = tf.zeros([size // 4])

        def work(vector: tf.Tensor = vector, name: str = name, times: int = times) -> object:
            with tf.device(where_carried(comm)):
                return [comm.allreduce(vector, "world", name, counted=False) for _ in range(times)][
                    -1
                ]

        seconds = statistics.median(timer(work)) / times - engine_s
        least, times = least or seconds / size, 1
        measured.append((size, max(seconds, least * size)))
    nodes, slots = comm.topology.nodes, comm.topology.slots
    gathers: list[tuple[int, float]] = []
    if nodes > 1 and not sends_messages(comm):
        # An allreduce sends 2 (p - 1) / p of its vector through a port
        least *= ranks / (2 * (ranks - 1))
        for size in sizes:
            entries = size // (4 * (nodes - 1) * slots)
            if entries:
                seconds = gather_s(comm, entries, timer) - engine_s
                gathers.append((size, max(seconds, least * size)))
    return Calibration(ranks, not_falling(measured[::-1]), nodes, not_falling(gathers))


def gather_s(comm: Comm, entries: int, timer: Timer) -> float:
    """Return the seconds of an all-gather of `entries` float32 from each rank among its peers.

    Unlike the messages by which links are measured, it is not one of a row: the ranks of a training
    also begin it at different times.

    **Ranks:** all.
    """
    name = f"tfcommx/probe/gather/{entries}"

    def work() -> tf.Tensor:
        with tf.device(where_carried(comm)):
            return comm.all_gather(vector, "peers", name, counted=False)

    with tf.device(where_carried(comm)):
        vector = tf.zeros([entries])
    return statistics.median(timer(work))


def measure_engine(comm: Comm, group: str, alpha_s: float, timer: Timer) -> EngineCost:
    """Measure the engine's time per collective and the latency of a group.

    Args:
        group: "node" or "peers", with more than one rank.
        alpha_s: latency of messages between two ranks, if they were measured, otherwise of
            all-gathers, including the engine's time.

    **Ranks:** all.
    """
    ranks, name = len(comm.members(group)), f"tfcommx/probe/engine/{group}"
    terms = latency_terms(engine_at_work(comm), ranks, group)
    with tf.device(where_carried(comm)):
        tensor = tf.zeros([TINY])

    def seconds(collective: Callable[[], object]) -> list[float]:
        # Several in a row, because the ranks' start times would dominate a single one

        def row() -> object:
            with tf.device(where_carried(comm)):
                return [collective() for _ in range(IN_A_ROW)][-1]

        return [time_s / IN_A_ROW for time_s in timer(row)]

    reduced = seconds(lambda: comm.allreduce(tensor, group, f"{name}/allreduce", counted=False))
    if sends_messages(comm):
        return EngineCost(alpha_s, [max(time_s - terms * alpha_s, 0.0) for time_s in reduced])
    gathered = seconds(lambda: comm.all_gather(tensor, group, f"{name}/all_gather", counted=False))
    steps = ranks - 1
    # Gloo's ring has twice the terms of an all-gather. NCCL's tree may have as many, or fewer. On
    # three nodes both have two, and latency and engine cannot be separated.
    more_terms = round(terms) - steps
    difference = statistics.median(reduced) - statistics.median(gathered)
    # At most that of all-gathers, which contains the engine's time
    alpha_s = min(max(difference / more_terms, 0.0), alpha_s) if more_terms else 0.0
    return EngineCost(alpha_s, [max(time_s - steps * alpha_s, 0.0) for time_s in gathered])


def engine_fuses(comm: Comm, timer: Timer) -> bool:
    """Return True if the engine fuses allreduces that wait for it at the same time.

    **Ranks:** all; the collectives of `comm` must work in traced code.
    """
    name = "tfcommx/probe/fusion"

    # An argument, because TensorFlow computes the allreduce of constants once for all calls
    @tf.function(autograph=False)
    def one(tensor: tf.Tensor) -> tf.Tensor:
        return comm.allreduce(tensor, "world", f"{name}/one", counted=False)

    @tf.function(autograph=False)
    def many(tensor: tf.Tensor) -> list[tf.Tensor]:
        return [
            comm.allreduce(tensor, "world", f"{name}/{number}", counted=False)
            for number in range(WAITING)
        ]

    with tf.device(where_carried(comm)):
        tensor = tf.zeros([TINY])
    together = statistics.median(timer(lambda: many(tensor)))
    # Unless they are fused, they take WAITING times as long as one
    return together < WAITING / 2 * statistics.median(timer(lambda: one(tensor)))


def measure_contention(
    work: Callable[[], object], load: Callable[[], object], timer: Timer
) -> list[float]:
    """Return the relative slowdown, >= 0, of a message while every rank computes, by repeat.

    Args:
        work: sends the message.
        load: computes for some milliseconds; called repeatedly.

    **Ranks:** all.
    """
    alone = statistics.median(timer(work))
    with _computing(load):
        loaded = timer(work)
    return [max(time_s / alone - 1, 0.0) for time_s in loaded]


def matmul_load() -> Callable[[], object]:
    """Return a load like a backward pass: products of matrices on all cores."""
    matrix = tf.random.stateless_normal([ROWS, ROWS], [1, 2])
    load: Callable[[], object] = tf.function(
        lambda: tf.reduce_sum(tf.linalg.matmul(matrix, matrix)), autograph=False
    )
    return load


@contextlib.contextmanager
def _computing(load: Callable[[], object]) -> Iterator[None]:
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            finish(load())

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # The next measurement must not compete with the last computation
        thread.join()
