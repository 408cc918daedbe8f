"""Claim: telling the watch what a rank does costs less than 0.1 % of a step.

    python scripts/bench watch
    python scripts/bench watch -n 2000000 --json watch.jsonl

Peer: the step itself, and an empty traced function. A step is the exchange and the update of 16
dense matrices in 4 buckets, without forward and backward pass, so shares are upper bounds. `marks`
is what the watch adds to it, traced alone, less an empty traced function; beside a step it hides
behind messages. `look` is one look of the thread while the rank waits; its share is that of a core,
at one look in 2 s. Verified: the marks count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from bench import options, ranks
from bench.peers import bare_step

import tfcommx as cx
from tfcommx.optim.wrapped import exchanger_in
from tfcommx.watch import liveness

LIMIT = 0.001
LAYERS, BUCKETS = 16, 4
CALLS = 200  # of what takes microseconds, in one timed round


def make_step(entries: int) -> tuple[Callable[[], float], keras.optimizers.Optimizer]:
    """Return a step of exchange and update, and its optimizer."""
    side = max(1, round((entries / LAYERS) ** 0.5))
    weights = [keras.Variable(tf.ones([side, side]), name=f"w{i}") for i in range(LAYERS)]
    scheme = cx.Scheme(bucket_bytes=4 * side * side * LAYERS // BUCKETS)
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme)
    return bare_step(optimizer, weights, [tf.ones([side, side]) for _ in weights]), optimizer


def make_marks(buckets: int) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return what the watch adds to a step of so many buckets, and how often it has counted."""
    waits = cx.collectives.current().progress.of_exchange([f"bucket {i}" for i in range(buckets)])
    gradients = [tf.ones([1]) for _ in range(LAYERS)]

    @tf.function
    def marks() -> None:
        number = waits.begin(gradients)
        for part in range(buckets):
            waits.end(part, gradients, number)

    return marks, waits.begun


@tf.function
def nothing() -> None:
    tf.no_op()


def median_seconds(call: Callable[[], object], rounds: int, calls: int = 1) -> float:
    """Return the median over the rounds of the seconds of one call."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found[1:])


def parser() -> argparse.ArgumentParser:
    return options.parser(__doc__, sizes=[25_600_000], repeats=15)


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time a step, and what the watch adds to it. **Ranks:** all."""
    comm = ranks.join(chosen)
    for entries in chosen.sizes:
        step, optimizer = make_step(entries)
        for _ in range(2):
            step()
        (run,) = exchanger_in(optimizer).runs.values()
        buckets = len(run.executor.plan.buckets)
        step_seconds = median_seconds(step, chosen.repeats)
        marks, begun = make_marks(buckets)
        empty = median_seconds(nothing, chosen.repeats, CALLS)
        marked = median_seconds(marks, chosen.repeats, CALLS)
        counts = begun() == CALLS * (chosen.repeats + 1)
        look = median_seconds(comm.progress.look, chosen.repeats, CALLS)
        added = max(0.0, marked - empty)
        share = added / step_seconds
        good = counts and (chosen.smoke or share < LIMIT)
        rows = [
            options.row("step", entries, step_seconds, True, buckets=buckets),
            options.row("marks", entries, added, good, share=share),
            options.row("look", entries, look, True, share=look / liveness.LOOK_SECONDS),
        ]
        title = f"{entries:,} entries, {comm.topology.size} ranks, {buckets} buckets"
        notes = [f"the marks cost {100 * share:.3f} % of a step (limit {100 * LIMIT} %)"]
        yield options.Table(title, rows, "step", notes=notes)
