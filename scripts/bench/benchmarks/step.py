"""Claim: dense gradients through a plan take no longer than plain Horovod's allreduce of each.

    python scripts/bench step                     # 25.6 M entries in the sizes of a ResNet-50
    python scripts/bench step -n 2000000 --ranks 4 --json step.jsonl

Peer: plain Horovod. Both run inside one tf.function each and take turns. Results are verified
against each other on every rank. `ratio` is the median, over the rounds, of the time over plain
Horovod's time in the same round. `limit_seconds` is 1.05 times plain Horovod's median.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from bench import options, ranks, rounds
from bench.peers import plain_allreduce

import tfcommx as cx
from tfcommx.collectives.comm import Comm
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
        order = [path for bucket in plan.buckets for path in bucket.variables]
        return list(plain_allreduce({path: gradients[path] for path in order}).values())

    return {"horovod": plain, "tfcommx": ours}, gradients


def parser() -> argparse.ArgumentParser:
    return options.parser(__doc__, sizes=[25_600_000], repeats=15)


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time both on gradients of n entries in all. **Ranks:** all."""
    comm = ranks.join(chosen)
    for n in chosen.sizes:
        sizes = gradient_sizes(n)
        steps, gradients = contestants(comm, sizes)
        pairs = zip(*(step(gradients) for step in steps.values()), strict=True)
        alike = all(np.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs)
        verified = all(comm.gather_objects(alike))
        calls = {
            name: lambda step=step: step(gradients)[-1].numpy()  # noqa: B023 (called here)
            for name, step in steps.items()
        }
        seconds = rounds.take_turns(calls, chosen.repeats, comm, warm_up=0)
        own = {"ranks": comm.topology.size, "gradients": len(sizes)}
        rows = options.rows_of(n, seconds, verified, "horovod", ALLOWED, **own)
        title = f"{n:,} entries, {len(sizes)} gradients, {comm.topology.size} ranks"
        yield options.Table(title, rows, "horovod")
