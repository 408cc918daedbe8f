"""Claim: a step of `Scheme("auto")` takes at most 1.02 times plain Horovod's.

    python scripts/bench auto -n 2000000                                     # loses nothing
    python scripts/bench auto -n 10000000 --density 0.01 --nodes 4 --rate 200mbit    # may select

Peers: plain Horovod, and plans chosen by hand. Each scheme trains its own network of dense layers
with n parameters in total: "plain" with plain Horovod, one allreduce per gradient, without tfcommx;
"Scheme()" with the same collectives in buckets. Each scheme takes its first steps alone; for "auto"
they are its trial (`begin_seconds` is their total time, with tracing, link measurement and
planning). Then the schemes take turns, and `ratio` is the median, over the rounds, of the time over
plain Horovod's in the same round. `density` and `chosen` describe the plan used in these rounds;
for "auto" it is the plan that the trial chose. Verified: no trial is still running, all ranks have
equal replicas, a final step with known gradients under the same plan returns their average, and
without selection the weights have moved as plain Horovod's. Files of earlier runs are not used.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from bench import options, plans, ranks, rounds
from bench.checks import moved_alike
from bench.peers import plain_optimizer

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.core import Link, Links
from tfcommx.runtime.trial import STEPS

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
    """Return plain Horovod (None), "auto" and, if it may select, hand-picked schemes."""
    found: dict[str, cx.Scheme | None] = {"plain": None, "Scheme()": cx.Scheme()}
    if density == 1:
        return {**found, "auto": cx.Scheme("auto")}
    found["auto"] = cx.Scheme("auto", "mstopk", density)
    for wire in ("pair32", "block16/float16", "elias/int8"):
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
        optimizer = plain_optimizer(keras.optimizers.SGD(0.01))
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
    right = plans.sums_are_right(comm, one.optimizer, one.net.trainable_variables)
    decided = plans.is_decided(one.optimizer)
    return all(comm.gather_objects(alike and equal and right and decided))


def how(one: Contestant, density: float) -> tuple[float, str]:
    """Return the density at which a contestant sends, and its plan in words."""
    at_work = [executor.plan for executor in plans.executors(one.optimizer)]
    if not at_work:
        return 1.0, "one allreduce for each gradient"
    words = plans.in_words(at_work[0])
    decided = plans.is_decided(one.optimizer)
    return density if plans.selects(at_work[0]) else 1.0, words if decided else "undecided"


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, sizes=[2_000_000], repeats=15)
    found.add_argument("--density", type=float, default=1.0, help="1: nothing is selected")
    found.add_argument(
        "--assume-slow",
        action="store_true",
        help="predict by links of 80 Mbit/s, so that plans are tried in any case",
    )
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time all schemes. **Ranks:** all."""
    links = Links(SLOW, SLOW) if chosen.assume_slow else None
    comm = ranks.join(chosen)
    with tempfile.TemporaryDirectory() as folder:
        for n in chosen.sizes:
            os.environ["TFCOMMX_CACHE"] = os.path.join(folder, str(n))
            yield race(comm, n, links, chosen)


def race(comm: Comm, n: int, links: Links | None, chosen: argparse.Namespace) -> options.Table:
    """Time all schemes on a network of n parameters. **Ranks:** all."""
    contestants, begin, lossless = {}, {}, chosen.density == 1
    for name, scheme in schemes_of(chosen.density).items():
        contestants[name] = contestant(n, scheme, links)
        # Without selection all take equally many steps: their weights are compared
        steps = BEFORE if lossless or name == "auto" else WARM_UP
        begin[name] = run(comm, contestants[name], range(steps))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(chosen.repeats):
        first = BEFORE + turn * STEPS_A_ROUND
        for name in rounds.turns(contestants, turn):
            taken = run(comm, contestants[name], range(first, first + STEPS_A_ROUND))
            seconds[name].append(taken / STEPS_A_ROUND)
    plain = contestants["plain"]
    right = {name: verified(comm, one, plain, lossless) for name, one in contestants.items()}
    rows = options.rows_of(n, seconds, right, "plain", ALLOWED, ranks=comm.topology.size)
    for row, one in zip(rows, contestants.values(), strict=True):
        row["density"], row["chosen"] = how(one, chosen.density)
        row["begin_seconds"] = begin[row["name"]]
    own = {"begin, s": lambda one: f"{one['begin_seconds']:.1f}"}
    notes = [f"{one['name']}: {one['chosen']}" for one in rows]
    return options.Table(f"{n:,} parameters, {comm.topology}", rows, "plain", own, notes)
