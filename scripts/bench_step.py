#!/usr/bin/env python3
"""Claim: exchanging dense gradients through a plan is not slower than plain Horovod's allreduce of
each gradient.

    horovodrun -np 2 --gloo python scripts/bench_step.py                  # 25.6 M entries in the
    sizes of a ResNet-50 horovodrun -np 2 --gloo python scripts/bench_step.py --entries 2000000
    --json step.jsonl

Both run inside one tf.function each and take turns, round by round; the median counts. Results are
verified against each other. `ratio` is time over plain Horovod's in the same run; `limit` is 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tfcommx as cx
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor

LIMIT = 1.05
WIDTHS = (64, 128, 256, 512)  # of ResNet-50's stages, with their numbers of blocks
BLOCKS = (3, 4, 6, 3)


def sizes(entries: int) -> list[int]:
    """The gradient sizes of a ResNet-50, forward order, scaled to about `entries` in all."""
    found = [7 * 7 * 3 * 64, 64, 64]
    for width, blocks in zip(WIDTHS, BLOCKS, strict=True):
        for block in range(blocks):
            inner = width * 4 if block else width * 2
            found += [
                inner * width,
                width,
                width,
                9 * width * width,
                width,
                width,
                width * width * 4,
                width * 4,
                width * 4,
            ]
    found += [2048 * 1000, 1000]
    return [max(1, round(size * entries / sum(found))) for size in found]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--entries", type=int, default=25_600_000)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--json", type=Path, help="write one object a line")
    chosen = options.parse_args()
    comm = cx.init()
    shapes = {f"w{i}": (size,) for i, size in enumerate(sizes(chosen.entries))}
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
    def ours() -> list[tf.Tensor]:
        return list(executor.exchange(gradients).values())

    @tf.function
    def plain() -> list[tf.Tensor]:
        return [
            hvd.allreduce(gradients[path], op=hvd.Average, name=f"plain/{path}")
            for bucket in plan.buckets
            for path in bucket.variables
        ]

    for mine, theirs in zip(ours(), plain(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    seconds: dict[str, list[float]] = {"tfcommx": [], "horovod": []}
    for _ in range(chosen.rounds):
        for name, function in (("tfcommx", ours), ("horovod", plain)):
            comm.gather_objects("ready")
            start = time.perf_counter()
            function()[-1].numpy()
            comm.gather_objects("done")
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(rows) for name, rows in seconds.items()}
    ratio = statistics.median(
        a / b for a, b in zip(seconds["tfcommx"], seconds["horovod"], strict=True)
    )
    if comm.rank == 0:
        table = Table(
            title=f"{sum(sizes(chosen.entries)):,} entries, {len(shapes)} gradients, "
            f"{comm.topology.size} ranks"
        )
        for heading in ("name", "seconds", "ratio", "limit"):
            table.add_column(heading)
        table.add_row("horovod", f"{median['horovod']:.4f}", "1", "")
        table.add_row("tfcommx", f"{median['tfcommx']:.4f}", f"{ratio:.3f}", f"{LIMIT}")
        Console(width=100).print(table)
        if chosen.json:
            rows = [
                {
                    "name": name,
                    "entries": chosen.entries,
                    "ranks": comm.topology.size,
                    "seconds": median[name],
                    "ratio": ratio if name == "tfcommx" else 1.0,
                    "limit": LIMIT,
                    "verified": True,
                }
                for name in median
            ]
            chosen.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
