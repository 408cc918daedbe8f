#!/usr/bin/env python3
"""Claim: the replica guard costs less than 0.5 % of a step, at its default of a check in 100 steps.

    horovodrun -np 2 -H localhost:2 --gloo python scripts/bench_guard.py
    horovodrun -np 2 -H localhost:2 --gloo python scripts/bench_guard.py -n 2000000 --json g.jsonl

A step is the exchange and the update of the variables of a ResNet-50, scaled to n entries in all,
without forward and backward pass: the share of a whole step is less. Steps without a guard, steps
between two checks and steps with a check take turns; the slowest rank counts. `share` is of 100
steps, one of them with a check: the median, over the rounds, of what a step takes more than the one
without a guard, over the median of those. Verified: a replica that is changed on one rank is found,
and the share of what checks cost is within the limit. (What a step between two checks costs is less
than its median varies, so it is shown but not judged.)
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import tfcommx.cli.quiet_start

# isort: split
import benchmark_options
import benchmark_times
import keras
import tensorflow as tf
from bench_step import gradient_sizes

import tfcommx as cx

EVERY = 100  # steps between two checks, the default
LIMIT = 0.005
# Steps between two checks -> what is measured
KINDS = {"no guard": None, "between checks": 10**9, "with a check": 1}


def make_step(every: int | None, entries: int) -> tuple[Callable[[], float], list]:
    """Return a step of exchange and update, which returns when it is done, and its variables."""
    sizes = gradient_sizes(entries)
    weights = [keras.Variable(tf.ones([n]), name=f"w{i}") for i, n in enumerate(sizes)]
    optimizer = cx.DistributedOptimizer(
        keras.optimizers.SGD(0.01), cx.Scheme(), check_replicas_every=every
    )
    optimizer.build(weights)
    gradients = [tf.ones_like(weight) for weight in weights]

    # Arguments, because TensorFlow computes the exchange of constants once for all steps; a result,
    # because a step without one returns before it is done
    @tf.function
    def step(gradients: list[tf.Tensor]) -> tf.Tensor:
        optimizer.apply(gradients, weights)
        return weights[0][0]

    return lambda: float(step(gradients)), weights


def seconds_of(step: Callable[[], float]) -> float:
    """Return the time of the slowest rank. **Ranks:** all."""
    comm = cx.comm.current()
    comm.gather_objects("ready")
    start = time.perf_counter()
    step()
    return max(comm.gather_objects(time.perf_counter() - start))


def finds_a_difference(step: Callable[[], float], weights: list) -> bool:
    """Change one entry on rank 1; tell whether the next check refuses it."""
    if cx.rank() == 1:
        weights[0].assign(tf.tensor_scatter_nd_add(weights[0], [[0]], [1e-6]))
    try:
        step()
    except tf.errors.OpError as error:
        return "Replicas differ" in str(error)
    return False


def measure(entries: int, repeats: int) -> list[dict]:
    """Time all kinds of steps on variables of so many entries in all. **Ranks:** all."""
    made = {name: make_step(every, entries) for name, every in KINDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for number in range(-2, repeats):  # the first rounds trace, and touch new memory
        for name in benchmark_times.turns(KINDS, number):
            taken = seconds_of(made[name][0])
            if number >= 0:
                seconds[name].append(taken)
    without = statistics.median(seconds["no guard"])

    def more(name: str) -> float:
        pairs = zip(seconds[name], seconds["no guard"], strict=True)
        return statistics.median(mine - other for mine, other in pairs) / without

    shares = {"no guard": 0.0, "between checks": more("between checks")}
    shares["with a check"] = more("with a check") / EVERY
    found = finds_a_difference(*made["with a check"])
    rows = []
    for name in KINDS:
        verified = name != "with a check" or (found and shares[name] < LIMIT)
        taken = statistics.median(seconds[name])
        rows.append(
            benchmark_options.row(
                name, entries, taken, verified, share=shares[name], rounds=len(seconds[name])
            )
        )
    return rows


def main() -> int:
    chosen = benchmark_options.parser(__doc__, sizes=[25_600_000], repeats=41).parse_args()
    cx.init()
    rows = []
    for entries in chosen.sizes:
        rows += measure(entries, chosen.repeats)
        if cx.is_chief():
            benchmark_options.print_table(
                rows[-len(KINDS) :],
                f"{entries:,} entries, {cx.size()} ranks; a check in {EVERY} steps, limit "
                f"{100 * LIMIT} %",
                "no guard",
                own={"share of a step": lambda row: f"{100 * row['share']:.3f} %"},
            )
    return benchmark_options.finish(rows, chosen) if cx.is_chief() else 0


if __name__ == "__main__":
    sys.exit(main())
