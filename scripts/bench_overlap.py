#!/usr/bin/env python3
"""Claim: with buckets of the default size dense gradients hide behind the backward pass.

    horovodrun -np 2 --gloo python scripts/bench_overlap.py
    horovodrun -np 4 --gloo python scripts/bench_overlap.py --bucket-mib 1 4 32 --repeats 31

A step of 8 dense layers of n weights each: forward, backward, exchange, update. Plain Horovod (an
allreduce for each gradient) and `Scheme()` with several sizes of buckets take turns, round by
round; the median counts. Averages are verified against plain Horovod's. Columns of its own:
`buckets`, and `ratio`, the median over the rounds of the time over plain Horovod's in the same
round. `limit_seconds` is 1.02 times plain Horovod's median.
Options and columns: scripts/benchmark_options.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import tfcommx.cli.quiet_start

# isort: split
import benchmark_options
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import tfcommx as cx
from tfcommx.comm.base import Comm
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor

LAYERS, ROWS, RATE = 8, 32, 1e-6
ALLOWED = 1.02
Exchange = Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]]


def plain(gradients: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Exchange as plain Horovod does: each gradient as soon as it is ready."""
    return {
        name: hvd.allreduce(gradient, op=hvd.Average, name=f"plain/{name}")
        for name, gradient in reversed(gradients.items())
    }


def step_of(exchange: Exchange, width: int, rank: int) -> Callable[[], dict[str, tf.Tensor]]:
    """Return a traced step, which returns the averages."""
    weights = [
        tf.Variable(tf.random.stateless_normal([width, width], [1, layer]) / width**0.5)
        for layer in range(LAYERS)
    ]
    inputs = tf.random.stateless_normal([ROWS, width], [2, rank])

    @tf.function(autograph=False)
    def step() -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = inputs
            for one in weights:
                outputs = tf.nn.relu(outputs @ one)
            loss = tf.reduce_mean(outputs**2)
        found = tape.gradient(loss, weights)
        averages = exchange({f"w{place}": one for place, one in enumerate(found)})
        for place, one in enumerate(weights):
            one.assign_sub(RATE * averages[f"w{place}"])
        return averages

    return step


def measure(comm: Comm, n: int, sizes: list[float], repeats: int) -> list[dict[str, Any]]:
    """Time all contestants; return a row for each. **Ranks:** all."""
    width = math.isqrt(n)
    gradients = [Gradient(f"w{place}", (width, width), "float32") for place in range(LAYERS)]
    steps, buckets = {"horovod": step_of(plain, width, comm.rank)}, {"horovod": 0}
    for size in sizes:
        scheme = {"*": cx.Scheme(bucket_bytes=round(size * 2**20))}
        plan, name = make_plan(gradients, scheme, comm.topology), f"{size:g} MiB"
        steps[name] = step_of(PlanExecutor(plan, comm).exchange, width, comm.rank)
        buckets[name] = len(plan.buckets)
    # The first round also traces
    first = {name: step() for name, step in steps.items()}
    alike = all(
        np.allclose(one, found[path], rtol=1e-4, atol=1e-6 * np.abs(one).max())
        for found in first.values()
        for path, one in first["horovod"].items()
    )
    verified = all(comm.gather_objects(alike))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            comm.gather_objects("ready")
            start = time.perf_counter()
            step()
            mine = time.perf_counter() - start
            seconds[name].append(max(comm.gather_objects(mine)))
    base = seconds["horovod"]
    return [
        benchmark_options.row(
            name,
            n,
            times,
            verified,
            limit_seconds=ALLOWED * statistics.median(base),
            ranks=comm.topology.size,
            buckets=buckets[name],
            ratio=statistics.median(a / b for a, b in zip(times, base, strict=True)),
        )
        for name, times in seconds.items()
    ]


def main() -> int:
    options = benchmark_options.parser(
        __doc__, sizes=[2**20], repeats=21, meaning_of_sizes="weights of a layer"
    )
    options.add_argument(
        "--bucket-mib", type=float, nargs="+", default=[1, 4, 32], help="default: %(default)s"
    )
    chosen = options.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    comm, rows = cx.init(), []
    for n in chosen.sizes:
        found = measure(comm, n, chosen.bucket_mib, chosen.repeats)
        rows += found
        if comm.rank == 0:
            own = {
                "buckets": lambda one: str(one["buckets"] or ""),
                "ratio": lambda one: f"{one['ratio']:.3f}",
            }
            title = f"{LAYERS} layers of {n:,} weights, {comm.topology.size} ranks"
            benchmark_options.print_table(found, title, base="horovod", own=own)
    if comm.rank == 0:
        return benchmark_options.finish(rows, chosen)
    return 0 if all(one["verified"] for one in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
