#!/usr/bin/env python3
"""Claim: telling the watch what a rank does costs less than 0.1 % of a step.

    horovodrun -np 2 -H localhost:2 --gloo python scripts/bench_watch.py
    horovodrun -np 2 -H localhost:2 --gloo python scripts/bench_watch.py -n 2000000 --json w.jsonl

A step is the exchange and the update of 16 dense matrices in 4 buckets, without forward and
backward pass, so shares are upper bounds. `marks` is what the watch adds to it, traced alone, less
an empty traced function; beside a step it hides behind messages. `look` is one look of the thread
while the rank waits; its share is that of a core, at one look in 2 s. Verified: the marks count.
Options and columns: scripts/benchmark_options.py.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import tfcommx.cli.quiet_start

# isort: split
import benchmark_options
import keras
import tensorflow as tf

import tfcommx as cx
from tfcommx.comm import liveness
from tfcommx.optim.wrapped import exchanger_in

LIMIT = 0.001
LAYERS, BUCKETS = 16, 4
CALLS = 200  # of what takes microseconds, in one timed round


def make_step(entries: int) -> tuple[Callable[[], float], keras.optimizers.Optimizer]:
    """Return a step of exchange and update, which returns when it is done, and its optimizer."""
    side = max(1, round((entries / LAYERS) ** 0.5))
    weights = [keras.Variable(tf.ones([side, side]), name=f"w{i}") for i in range(LAYERS)]
    scheme = cx.Scheme(bucket_bytes=4 * side * side * LAYERS // BUCKETS)
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme)
    optimizer.build(weights)
    gradients = [tf.ones([side, side]) for _ in weights]

    # Arguments, because TensorFlow computes the exchange of constants once for all steps; a result,
    # because a step without one returns before it is done
    @tf.function
    def step(gradients: list[tf.Tensor]) -> tf.Tensor:
        optimizer.apply(gradients, weights)
        return weights[0][0, 0]

    return lambda: float(step(gradients)), optimizer


def make_marks(buckets: int) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return what the watch adds to a step of so many buckets, and how often it has counted."""
    waits = cx.comm.current().progress.of_exchange([f"bucket {i}" for i in range(buckets)])
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


def main() -> int:
    chosen = benchmark_options.parser(__doc__, sizes=[25_600_000], repeats=15).parse_args()
    comm = cx.init()
    rows = []
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
        share = max(0.0, marked - empty) / step_seconds
        row = benchmark_options.row
        rows += [
            row("step", entries, step_seconds, True, buckets=buckets),
            row("marks", entries, max(0.0, marked - empty), counts and share < LIMIT, share=share),
            row("look", entries, look, True, share=look / liveness.LOOK_SECONDS),
        ]
        if cx.is_chief():
            benchmark_options.print_table(
                rows[-3:], f"{entries:,} entries, {cx.size()} ranks, {buckets} buckets", "step"
            )
            print(f"the marks cost {100 * share:.3f} % of a step (limit {100 * LIMIT} %)")
    return benchmark_options.finish(rows, chosen) if cx.is_chief() else 0


if __name__ == "__main__":
    sys.exit(main())
