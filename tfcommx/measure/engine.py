"""Measures what collectives cost besides their price: the engine's own time, and under load.

    tiny all-gather    | engine | log2(p) alpha |
    tiny allreduce     | engine |      2 (p - 1) alpha      |

Both latency terms and the engine's time are paid by every collective, so two kinds of collective
tell them apart. If messages are possible, they give alpha without the engine.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tfcommx.comm.base import Comm

# Work that takes a turn of some messages: the seconds of the slowest rank, of each turn
Turns = Callable[[Callable[[], object]], list[float]]

# Entries of the vectors that are hardly more than a latency term
TINY = 8
# Allreduces that wait for the engine at once
WAITING = 16
# Rows of the square matrices that are multiplied as a load
ROWS = 384


class Engine(NamedTuple):
    """What one group's collectives cost besides bytes."""

    # Seconds of a latency term, >= 0
    alpha_s: float
    # Seconds of the engine for a collective, >= 0, of each turn
    seconds: list[float]


def engine_of(comm: Comm, group: str, alpha_s: float, turns: Turns) -> Engine:
    """Tell the engine's time from the latency terms of a group.

    Args:
        comm: this rank's view of the others.
        group: "node" or "peers", of more than one rank.
        alpha_s: of messages between two ranks, if there are such; else of all-gathers, with the
            engine's time in it.
        turns: times some work.

    **Ranks:** all.
    """
    ranks, tensor = len(comm.members(group)), tf.zeros([TINY])
    terms, name = 2 * (ranks - 1), f"tfcommx/probe/engine/{group}"
    reduced = turns(lambda: comm.allreduce(tensor, group, f"{name}/allreduce", counted=False))
    if comm.has_messages:
        return Engine(alpha_s, [max(one - terms * alpha_s, 0.0) for one in reduced])
    gathered = turns(lambda: comm.all_gather(tensor, group, f"{name}/all_gather", counted=False))
    fewer = math.log2(ranks)
    found = (statistics.median(reduced) - statistics.median(gathered)) / (terms - fewer)
    alpha_s = min(max(found, 0.0), alpha_s)
    return Engine(alpha_s, [max(one - fewer * alpha_s, 0.0) for one in gathered])


def engine_fuses(comm: Comm, turns: Turns) -> bool:
    """Tell whether allreduces that wait for the engine together are carried out as one.

    **Ranks:** all. The library must work in traced code.
    """
    name = "tfcommx/probe/fusion"

    # An argument, because TensorFlow computes the allreduce of constants once for all calls
    @tf.function(autograph=False)
    def one(tensor: tf.Tensor) -> tf.Tensor:
        return comm.allreduce(tensor, "world", f"{name}/one", counted=False)

    @tf.function(autograph=False)
    def many(tensor: tf.Tensor) -> list[tf.Tensor]:
        return [
            comm.allreduce(tensor, "world", f"{name}/{place}", counted=False)
            for place in range(WAITING)
        ]

    tensor = tf.zeros([TINY])
    together = statistics.median(turns(lambda: many(tensor)))
    return together < WAITING / 2 * statistics.median(turns(lambda: one(tensor)))


def contention_of(
    work: Callable[[], object], load: Callable[[], object], turns: Turns
) -> list[float]:
    """Return by how much longer a message takes while every rank computes, of each turn.

    Args:
        work: the message.
        load: computes, for some milliseconds; it is called again and again.
        turns: times some work.

    Returns:
        Seconds under load over those without, less 1, >= 0.

    **Ranks:** all.
    """
    alone = statistics.median(turns(work))
    with _computing(load):
        loaded = turns(work)
    return [max(one / alone - 1, 0.0) for one in loaded]


def multiply() -> Callable[[], object]:
    """Return a load like a backward pass: products of matrices on all cores."""
    matrix = tf.random.stateless_normal([ROWS, ROWS], [1, 2])
    return tf.function(lambda: tf.reduce_sum(tf.linalg.matmul(matrix, matrix)), autograph=False)


@contextlib.contextmanager
def _computing(load: Callable[[], object]) -> Iterator[None]:
    """Let a thread compute until the end."""
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            load()

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
