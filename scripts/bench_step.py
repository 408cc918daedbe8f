#!/usr/bin/env python3
"""Claim: dense gradients through a plan take no longer than plain Horovod's allreduce of each.

    horovodrun -np 2 --gloo python scripts/bench_step.py
                                          # 25.6 M entries in the sizes of a ResNet-50
    horovodrun -np 2 --gloo python scripts/bench_step.py -n 2000000 --json step.jsonl

Both run inside one tf.function each and take turns, round by round; the median counts. Results are
verified against each other on every rank. `ratio` is the median, over the rounds, of the time over
plain Horovod's time in the same round. `limit_seconds` is 1.05 times plain Horovod's median.
Options and columns: scripts/benchmark_options.py.
"""

from __future__ import annotations

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

ALLOWED = 1.05  # times plain Horovod
WIDTHS = (64, 128, 256, 512)  # of ResNet-50's stages, with their numbers of blocks
BLOCKS = (3, 4, 6, 3)


def gradient_sizes(entries: int) -> list[int]:
    """Return the gradient sizes of a ResNet-50, forward order, scaled to about `entries` in all."""
    found = [7 * 7 * 3 * 64, 64, 64]
    for width, blocks in zip(WIDTHS, BLOCKS, strict=True):
        for block in range(blocks):
            inner = width * 4 if block else width * 2
            found += [inner * width, width, width]
            found += [9 * width * width, width, width]
            found += [width * width * 4, width * 4, width * 4]
    found += [2048 * 1000, 1000]
    return [max(1, round(size * entries / sum(found))) for size in found]


Step = Callable[[dict[str, tf.Tensor]], list[tf.Tensor]]


def contestants(comm: Comm, sizes: list[int]) -> tuple[dict[str, Step], dict[str, tf.Tensor]]:
    """Return a step of each, and gradients: their averages, in the same order.

    Gradients are arguments: TensorFlow computes the allreduce of small constants once for all.

    **Ranks:** all, with the same sizes.
    """
    shapes = {f"w{i}": (size,) for i, size in enumerate(sizes)}
    numbers = np.random.default_rng(comm.rank)
    gradients = {
        path: tf.constant(numbers.standard_normal(shape, np.float32))
        for path, shape in shapes.items()
    }
    plan = make_plan(
        [Gradient(path, shape, "float32") for path, shape in shapes.items()],
        {"*": cx.Scheme()},
        comm.topology,
    )
    executor = PlanExecutor(plan, comm)

    @tf.function
    def ours(gradients: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        return list(executor.exchange(gradients).values())

    @tf.function
    def plain(gradients: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        return [
            hvd.allreduce(gradients[path], op=hvd.Average, name=f"plain/{path}")
            for bucket in plan.buckets
            for path in bucket.variables
        ]

    return {"tfcommx": ours, "horovod": plain}, gradients


def measure(comm: Comm, n: int, repeats: int) -> list[dict[str, Any]]:
    """Time both on gradients of n entries in all; return a row for each. **Ranks:** all."""
    sizes = gradient_sizes(n)
    steps, gradients = contestants(comm, sizes)
    # The first round also traces.
    pairs = zip(*(steps[name](gradients) for name in ("tfcommx", "horovod")), strict=True)
    alike = all(np.allclose(mine, theirs, rtol=1e-5, atol=1e-6) for mine, theirs in pairs)
    verified = all(comm.gather_objects(alike))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            comm.gather_objects("ready")
            start = time.perf_counter()
            step(gradients)[-1].numpy()
            mine = time.perf_counter() - start
            seconds[name].append(max(comm.gather_objects(mine)))
    plain = seconds["horovod"]
    return [
        benchmark_options.row(
            name,
            n,
            seconds[name],
            verified,
            limit_seconds=ALLOWED * statistics.median(plain),
            ranks=comm.topology.size,
            gradients=len(sizes),
            ratio=statistics.median(a / b for a, b in zip(seconds[name], plain, strict=True)),
        )
        for name in ("horovod", "tfcommx")
    ]


def main() -> int:
    options = benchmark_options.parser(__doc__, sizes=[25_600_000], repeats=15)
    chosen = options.parse_args()
    comm = cx.init()
    rows = []
    for n in chosen.sizes:
        found = measure(comm, n, chosen.repeats)
        rows += found
        if comm.rank == 0:
            title = f"{n:,} entries, {found[0]['gradients']} gradients, {comm.topology.size} ranks"
            own = {"ratio": lambda one: f"{one['ratio']:.3f}"}
            benchmark_options.print_table(found, title, base="horovod", own=own)
    if comm.rank == 0:
        return benchmark_options.finish(rows, chosen)
    return 0 if all(one["verified"] for one in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
