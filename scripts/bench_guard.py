#!/usr/bin/env python3
"""Claim: the replica guard costs less than 0.5 % of a step, at its default of a check in 100 steps.

    horovodrun -np 2 -H localhost:2 --gloo python scripts/bench_guard.py
    horovodrun -np 2 -H localhost:2 --gloo python scripts/bench_guard.py -n 2000000 --json g.jsonl

A step is the exchange and the update of one dense matrix a layer, without forward and backward
pass, so the share is an upper bound. Steps without a check and with one take turns; `share` is the
difference of their medians, divided by 100 steps without. Verified: a replica that is changed on
one rank is found.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import benchmark_options
import keras
import tensorflow as tf

import tfcommx as cx

EVERY = 100  # steps between two checks, the default
LIMIT = 0.005
LAYERS = 16


def make_step(
    every: int | None, entries: int
) -> tuple[tf.types.experimental.PolymorphicFunction, list]:
    """Return a traced step of exchange and update, and its variables."""
    side = max(1, round((entries / LAYERS) ** 0.5))
    weights = [keras.Variable(tf.ones([side, side]), name=f"w{i}") for i in range(LAYERS)]
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01), check_replicas_every=every)
    optimizer.build(weights)
    gradients = [tf.ones([side, side]) for _ in weights]

    @tf.function
    def step() -> None:
        optimizer.apply(gradients, weights)

    return step, weights


def seconds_of(step: tf.types.experimental.PolymorphicFunction) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def finds_a_difference(step: tf.types.experimental.PolymorphicFunction, weights: list) -> bool:
    """Change one entry on rank 1; tell whether the next check refuses it."""
    if cx.rank() == 1:
        weights[0].assign(tf.tensor_scatter_nd_add(weights[0], [[0, 0]], [1e-6]))
    try:
        step()
    except tf.errors.OpError as error:
        return "Replicas differ" in str(error)
    return False


def main() -> int:
    chosen = benchmark_options.parser(__doc__, sizes=[25_600_000], repeats=15).parse_args()
    cx.init()
    rows = []
    for entries in chosen.sizes:
        plain, _ = make_step(None, entries)
        checked, weights = make_step(1, entries)
        for step in (plain, checked, plain, checked):
            step()
        pairs = [(seconds_of(plain), seconds_of(checked)) for _ in range(chosen.repeats)]
        without, with_check = (statistics.median(side) for side in zip(*pairs, strict=True))
        share = max(0.0, with_check - without) / (EVERY * without)
        verified = finds_a_difference(checked, weights) and share < LIMIT
        row = benchmark_options.row("plain", entries, without, True)
        rows += [
            row,
            benchmark_options.row("with a check", entries, with_check, verified, share=share),
        ]
        if cx.is_chief():
            benchmark_options.print_table(
                rows[-2:], f"{entries:,} entries, {cx.size()} ranks", "plain"
            )
            print(f"a check in {EVERY} steps costs {100 * share:.3f} % (limit {100 * LIMIT} %)")
    return benchmark_options.finish(rows, chosen) if cx.is_chief() else 0


if __name__ == "__main__":
    sys.exit(main())
