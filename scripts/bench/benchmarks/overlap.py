"""Claim: with buckets of the default size dense gradients hide behind the backward pass.

    python scripts/bench overlap
    python scripts/bench overlap --ranks 4 --bucket-mib 1 4 32 --repeats 31

Peer: plain Horovod, an allreduce for each gradient. A step of 8 dense layers of n weights each:
forward, backward, exchange, update. Plain Horovod and `Scheme()` with several sizes of buckets take
turns. Averages are verified against plain Horovod's. Columns of its own: `buckets`, and `ratio`,
the median over the rounds of the time over plain Horovod's in the same round. `limit_seconds` is
1.02 times plain Horovod's median.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from bench import options, ranks, rounds
from bench.peers import plain_allreduce, threads

import tfcommx as cx
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor

LAYERS, ROWS, RATE = 8, 32, 1e-6
ALLOWED = 1.02
Exchange = Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]]


def plain(gradients: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Exchange as plain Horovod does: each gradient as soon as it is ready."""
    return plain_allreduce(dict(reversed(gradients.items())))


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


def parser() -> argparse.ArgumentParser:
    found = options.parser(
        __doc__, sizes=[2**20], repeats=21, meaning_of_sizes="weights of a layer"
    )
    found.add_argument(
        "--bucket-mib", type=float, nargs="+", default=[1, 4, 32], help="default: %(default)s"
    )
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time plain Horovod and all sizes of buckets. **Ranks:** all."""
    threads(1)
    comm = ranks.join(chosen)
    for n in chosen.sizes:
        width = math.isqrt(n)
        gradients = [Gradient(f"w{place}", (width, width), "float32") for place in range(LAYERS)]
        steps, buckets = {"horovod": step_of(plain, width, comm.rank)}, {"horovod": 0}
        for size in chosen.bucket_mib:
            scheme = {"*": cx.Scheme(bucket_bytes=round(size * 2**20))}
            plan, name = make_plan(gradients, scheme, comm.topology), f"{size:g} MiB"
            steps[name] = step_of(PlanExecutor(plan, comm).exchange, width, comm.rank)
            buckets[name] = len(plan.buckets)
        first = {name: step() for name, step in steps.items()}
        alike = all(
            np.allclose(one, found[path], rtol=1e-4, atol=1e-6 * np.abs(one).max())
            for found in first.values()
            for path, one in first["horovod"].items()
        )
        verified = all(comm.gather_objects(alike))
        seconds = rounds.take_turns(steps, chosen.repeats, comm, warm_up=0)
        own = {"ranks": comm.topology.size}
        rows = options.rows_of(n, seconds, verified, "horovod", ALLOWED, **own)
        rows = [row | {"buckets": buckets[row["name"]]} for row in rows]
        own = {"buckets": lambda one: str(one["buckets"] or "")}
        title = f"{LAYERS} layers of {n:,} weights, {comm.topology.size} ranks"
        yield options.Table(title, rows, "horovod", own)
