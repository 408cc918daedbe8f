#!/usr/bin/env python3
"""Claim: a step of `Scheme("auto")` takes at most 1.02 times plain Horovod's.

    horovodrun -np 2 --gloo python scripts/bench_auto.py -n 2000000          # loses nothing
    scripts/cluster up --nodes 4 --rate 200mbit --slots 1
    scripts/cluster run -- horovodrun -np 4 --gloo \\
        python scripts/bench_auto.py -n 10000000 --density 0.01              # may select

Each scheme trains a network of its own, of dense layers with n parameters in all: "plain" by plain
Horovod, one allreduce for each gradient, without tfcommx; "Scheme()" by the same collectives in
buckets. First each takes its first steps, which are the trial of "auto" (`begin_seconds` is all of
them, with tracing, links and planning). Then they take turns, in another order each round; the
median counts, and `ratio` is the median, over the rounds, of the time over plain Horovod's in the
same round. `density` and `chosen` are of the plan at work then, of "auto" the one that its trial
has decided for. Verified: no trial is under way any more, replicas are equal on all ranks, a step
with known gradients afterwards, by the same plan, gives their average, and without selection the
weights have moved as plain Horovod's. What earlier runs have kept is not used.
Options and columns: scripts/benchmark_options.py.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tfcommx.cli.quiet_start

# isort: split
import benchmark_options
import benchmark_times
import keras
import numpy as np
import plan_at_work
import tensorflow as tf
from plain_horovod import PlainHorovod
from verify_step import sums_are_right
from verify_weights import moved_alike

import tfcommx as cx
from tfcommx.comm.base import Comm
from tfcommx.runtime.trial_rounds import STEPS
from tfcommx.terms import Link, Links

ALLOWED = 1.02  # times plain Horovod
LAYERS, BATCH, STEPS_A_ROUND = 8, 8, 2
BEFORE, WARM_UP = STEPS + 4, 2
SLOW = Link(1e-6, 1e-7)
# Of the largest movement in a layer. A sum in another order may let a few units of a network switch
# in another step.
TOLERANCE = 1e-2


class Contestant(NamedTuple):
    net: keras.Model
    optimizer: keras.optimizers.Optimizer
    step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    # Weights before the first step
    start: list[np.ndarray]


def schemes_of(density: float) -> dict[str, cx.Scheme | None]:
    """Return plain Horovod (None), "auto", and, if it may select, what one would choose by hand."""
    found: dict[str, cx.Scheme | None] = {"plain": None, "Scheme()": cx.Scheme()}
    if density == 1:
        return {**found, "auto": cx.Scheme("auto")}
    found["auto"] = cx.Scheme("auto", "mstopk", density)
    for wire in ("pair32", "block16/float16"):
        for merging in ("threshold", "single"):
            name = f"allgather, {wire}, {merging}"
            found[name] = cx.Scheme("allgather", "mstopk", density, wire=wire, merging=merging)
    return found


def contestant(n: int, scheme: cx.Scheme | None, links: Links | None) -> Contestant:
    """Return a network of about n parameters, its optimizer and a traced step."""
    keras.utils.set_random_seed(1)
    width = round((n / LAYERS) ** 0.5)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)]
    net = keras.Sequential([keras.layers.Input((width,)), *layers])
    if scheme is None:
        optimizer = PlainHorovod(0.01, name="plain_horovod")
    else:
        optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme, links=links)
    optimizer.build(net.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(net(x) - y))
        values = [one.value for one in net.trainable_variables]
        optimizer.apply(tape.gradient(loss, values), net.trainable_variables)
        return loss

    return Contestant(net, optimizer, step, net.get_weights())


def run(comm: Comm, one: Contestant, numbers: range) -> float:
    """Take steps; return their seconds."""
    width = one.net.input_shape[-1]
    batches = []
    for number in numbers:
        drawn = np.random.default_rng([comm.rank, number]).random((2, BATCH, width), np.float32)
        batches.append((tf.constant(drawn[0]), tf.constant(drawn[1])))
    comm.gather_objects("ready")
    start = time.perf_counter()
    for x, y in batches:
        one.step(x, y).numpy()
    return max(comm.gather_objects(time.perf_counter() - start))


def verified(comm: Comm, one: Contestant, plain: Contestant, lossless: bool) -> bool:
    """Check the weights, the plan and a step by it; changes nothing. **Ranks:** all."""
    weights = one.net.get_weights()
    digests = comm.gather_objects([value.tobytes() for value in weights])
    alike = not lossless or moved_alike(weights, plain.net.get_weights(), one.start, TOLERANCE)
    equal = all(other == digests[0] for other in digests)
    right = sums_are_right(comm, one.optimizer, one.net.trainable_variables)
    decided = plan_at_work.is_decided(one.optimizer)
    return all(comm.gather_objects(alike and equal and right and decided))


def how(one: Contestant, density: float) -> tuple[float, str]:
    """Return the density of what a contestant sends, and how that travels."""
    plans = [executor.plan for executor in plan_at_work.executors(one.optimizer)]
    if not plans:
        return 1.0, "one allreduce for each gradient"
    words = plan_at_work.in_words(plans[0])
    decided = plan_at_work.is_decided(one.optimizer)
    return density if plan_at_work.selects(plans[0]) else 1.0, words if decided else "undecided"


def measure(
    comm: Comm, n: int, density: float, repeats: int, links: Links | None
) -> list[dict[str, Any]]:
    """Return a row for each scheme. **Ranks:** all."""
    contestants, begin = {}, {}
    for name, scheme in schemes_of(density).items():
        contestants[name] = contestant(n, scheme, links)
        # Without selection all take equally many steps: their weights are compared
        steps = BEFORE if density == 1 or name == "auto" else WARM_UP
        begin[name] = run(comm, contestants[name], range(steps))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats):
        first = BEFORE + turn * STEPS_A_ROUND
        for name in benchmark_times.turns(contestants, turn):
            taken = run(comm, contestants[name], range(first, first + STEPS_A_ROUND))
            seconds[name].append(taken / STEPS_A_ROUND)
    plain, rows = statistics.median(seconds["plain"]), []
    for name, one in contestants.items():
        sent, chosen = how(one, density)
        rows.append(
            benchmark_options.row(
                name,
                n,
                seconds[name],
                verified(comm, one, contestants["plain"], density == 1),
                sent,
                limit_seconds=ALLOWED * plain,
                ranks=comm.topology.size,
                ratio=benchmark_times.paired_ratio(seconds[name], seconds["plain"]),
                begin_seconds=begin[name],
                chosen=chosen,
            )
        )
    return rows


def main() -> int:
    options = benchmark_options.parser(__doc__, sizes=[2_000_000], repeats=15)
    options.add_argument("--density", type=float, default=1.0, help="1: nothing is selected")
    options.add_argument(
        "--assume-slow",
        action="store_true",
        help="predict by links of 80 Mbit/s, so that plans are tried in any case",
    )
    chosen = options.parse_args()
    links = Links(SLOW, SLOW) if chosen.assume_slow else None
    comm = cx.init()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in chosen.sizes:
            os.environ["TFCOMMX_CACHE"] = os.path.join(folder, str(n))
            found = measure(comm, n, chosen.density, chosen.repeats, links)
            rows += found
            if comm.rank == 0:
                own = {
                    "ratio": lambda one: f"{one['ratio']:.3f}",
                    "begin, s": lambda one: f"{one['begin_seconds']:.1f}",
                }
                title = f"{n:,} parameters, {comm.topology}"
                benchmark_options.print_table(found, title, base="plain", own=own)
                for one in found:
                    print(f"{one['name']}: {one['chosen']}")
    if comm.rank == 0:
        return benchmark_options.finish(rows, chosen)
    return 0 if all(one["verified"] for one in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
