"""Claim: batched pulls hide behind the forward pass; sharded steps are no slower than synchronous.

    python scripts/bench strategies --nodes 4 --rate 200mbit --json strategies.jsonl

Peers: synchronous training, and each way to pull. Each contestant trains a model of its own of `n`
entries; they take turns, and the slowest rank counts. Rows named "pull + forward" are the beginning
of a step: all weights are pulled, and the forward pass runs; `limit_seconds` of "batched" is that
of "at_once" over 1.3. Rows named "step" are whole training steps; their limit is 1.05 times
"synchronous".
Verified: after the last step all ranks have the same weights, and those of sharded training have
moved as those of the synchronous contestant, each entry to a thousandth of the largest movement in
its layer; no layer has stayed where it was.

Nodes of a virtual cluster share the machine's cores. So that each has a processor of its own, a
layer is a small matrix product and a wait: --forward seconds in all forward, twice that backward.
Where they lie is --shape: "even", or "front", as in a convolutional network, whose first layers
have most of the computation and the last few most of the weights. What a gather costs is measured
at the start, at two sizes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from bench import options, ranks, rounds
from bench.checks import moved_alike
from bench.peers import threads

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.core import Link, Links, Profile, VariableProfile
from tfcommx.planner.merging import pulls
from tfcommx.strategies import Sharded
from tfcommx.strategies.sharded.strategy import pull_times

GAIN = 1.3  # "batched" against "at_once"
ALLOWED = 1.05  # times a synchronous step
LAYERS = 12
TOLERANCE = 1e-3  # of the largest movement of a layer
OPTIMIZERS = {
    # At 0.01 one rounding of float32 would be some 2 % of what the last layers move
    "sgd": lambda: keras.optimizers.SGD(1.0, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(1e-4, weight_decay=0.01),
}


def waits(seconds: float) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return an identity that takes so long, and twice that in the backward pass."""

    def wait(tensor: tf.Tensor, length: float) -> tf.Tensor:
        def sleep(array: np.ndarray) -> np.ndarray:
            time.sleep(length)
            return array

        # Stateless: TensorFlow would make all that have a state follow each other.
        same = tf.numpy_function(sleep, [tensor], tensor.dtype, stateful=False)
        return tf.ensure_shape(same, tensor.shape)

    @tf.custom_gradient
    def layer(tensor: tf.Tensor) -> Any:
        return wait(tensor, seconds), lambda gradient: wait(gradient, 2 * seconds)

    return layer


class Net:
    """Layers of [width, entries of the layer / width] and what each waits."""

    def __init__(self, n: int, forward_s: float, shape: str, width: int = 256) -> None:
        # Shares of the entries, and of the forward pass
        late = [1.0] * 9 + [13.0] * 3
        shares, times = ([1.0] * LAYERS,) * 2 if shape == "even" else (late, [1.0] * 9 + [0.2] * 3)
        self.columns = [max(round(n * share / sum(shares) / width), 1) for share in shares]
        self.seconds = [forward_s * one / sum(times) for one in times]
        numbers = np.random.default_rng(1)
        self.weights = [
            keras.Variable(
                numbers.normal(size=(width, columns), scale=0.02).astype("float32"),
                name="kernel",
            )
            for place, columns in enumerate(self.columns)
        ]
        for place, one in enumerate(self.weights):  # Each a layer of its own
            one._path = f"layer{place}/kernel"
        self.start = [one.numpy() for one in self.weights]
        self.waits = [waits(seconds) for seconds in self.seconds]

    def forward(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return a loss; each layer's needs those before it."""
        value = inputs
        for weight, wait in zip(self.weights, self.waits, strict=True):
            product = tf.matmul(value, weight.value)
            value = wait(value + tf.reduce_mean(tf.tanh(product), axis=1, keepdims=True))
        return tf.reduce_mean(tf.square(value))

    def profile(self) -> Profile:
        """Return what is known of it: the waits are the times."""
        rows = [
            VariableProfile(
                weight.path,
                tuple(weight.shape),
                ready_s=2 * sum(self.seconds[place:]),
                forward_s=self.seconds[place],
            )
            for place, weight in enumerate(self.weights)
        ]
        total = sum(self.seconds)
        return Profile("net", tuple(reversed(rows)), total, 2 * total * (1 + 1e-9), batch=1)


class Contestant:
    """A model under a strategy: a traced step, and a traced beginning of one."""

    def __init__(self, comm: Comm, net: Net, make: Any, strategy: Any, links: Links) -> None:
        self.net = net
        scheme = cx.Scheme(bucket_bytes=4 * 2**20)
        self.optimizer = cx.DistributedOptimizer(make(), scheme, links=links, strategy=strategy)
        self.optimizer.build(net.weights)
        inputs = tf.random.stateless_normal([4, 256], [comm.rank, 7])
        if isinstance(strategy, Sharded):
            self.optimizer.exchanger.run_for(net.weights)

        @tf.function(autograph=False)
        def step(inputs: tf.Tensor) -> tf.Tensor:
            cx.begin_step(self.optimizer, inputs)
            with tf.GradientTape() as tape:
                tape.watch([one.value for one in net.weights])
                loss = net.forward(inputs)
            gradients = tape.gradient(loss, [one.value for one in net.weights])
            self.optimizer.apply(gradients, net.weights)
            return loss

        @tf.function(autograph=False)
        def beginning(inputs: tf.Tensor) -> tf.Tensor:
            if not isinstance(strategy, Sharded):
                return net.forward(inputs)
            run = self.optimizer.exchanger.run_for(net.weights)
            run.begin([inputs])
            run.shards.pulls_first = False
            if strategy.pull == "at_once":  # As the end of a step: no layer begins before
                with tf.control_dependencies([one.value.read_value() for one in net.weights]):
                    inputs = tf.identity(inputs)
            return net.forward(inputs)

        self.step = lambda: float(step(inputs))
        self.beginning = lambda: float(beginning(inputs))


def measure_gathers(comm: Comm, n: int) -> Links:
    """Return a link that prices all-gathers as they were measured at two sizes. **Ranks:** all."""
    seconds = []
    sizes = [n // 50 // comm.topology.size, n // 2 // comm.topology.size]
    for size in sizes:
        own = tf.ones([size])
        gather = tf.function(
            lambda one, size=size: comm.all_gather(one, "world", f"probe{size}"), autograph=False
        )
        call = {"gather": lambda gather=gather, own=own: gather(own)[0].numpy()}
        taken = rounds.take_turns(call, 5, comm, warm_up=1)["gather"]
        seconds.append(min(taken))  # What else the machine does only adds
    others = comm.topology.size - 1
    slope = max(seconds[1] - seconds[0], 1e-9) / (4 * (sizes[1] - sizes[0]))
    startup = max(seconds[0] - slope * 4 * sizes[0], 0.0)
    link = Link(startup / math.log2(comm.topology.size), slope / others)
    return Links(link, link)


def contestants(comm: Comm, chosen: Any, n: int, links: Links) -> dict[str, Contestant]:
    """Make all of them, with equal weights. **Ranks:** all."""

    def net() -> Net:
        return Net(n, chosen.forward, chosen.shape)

    strategies = {
        "synchronous": "synchronous",
        "at_once": Sharded(),
        "layers": Sharded("layers"),
        "ibatch": Sharded("batched", net().profile(), "ibatch"),
        "batched": Sharded("batched", net().profile()),
    }
    make = OPTIMIZERS[chosen.optimizer]
    return {
        name: Contestant(comm, net(), make, strategy, links)
        for name, strategy in strategies.items()
    }


def verify(comm: Comm, one: Contestant, reference: Contestant) -> bool:
    """Compare the weights with other ranks' and with the reference's. **Ranks:** all."""
    cx.consolidate(one.optimizer)
    mine = [weight.numpy() for weight in one.net.weights]
    sums = comm.gather_objects([float(np.sum(value, dtype=np.float64)) for value in mine])
    other = [weight.numpy() for weight in reference.net.weights]
    near = moved_alike(mine, other, one.net.start, TOLERANCE)
    return all(comm.gather_objects(near)) and all(one == sums[0] for one in sums)


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, [10_500_000], 5)
    found.add_argument("--forward", type=float, default=0.6, help="seconds of the forward pass")
    found.add_argument("--shape", choices=["even", "front"], default="front")
    found.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Measure all contestants. **Ranks:** all."""
    threads(1, 4)
    comm = ranks.join(chosen)
    own = {
        "simulated, ms": lambda one: (
            f"{one['simulated_seconds'] * 1e3:.0f}" if one["simulated_seconds"] else ""
        ),
        "gathers": lambda one: str(one["gathers"] or ""),
    }
    title = f"{comm.topology}, {chosen.shape}, {chosen.optimizer}, {chosen.forward} s forward"
    for n in chosen.sizes:
        yield options.Table(title, rows_of(comm, chosen, n), own=own)


def rows_of(comm: Comm, chosen: argparse.Namespace, n: int) -> list[dict[str, Any]]:
    """Let all contestants take turns on models of n entries. **Ranks:** all."""
    links = measure_gathers(comm, n)
    made = contestants(comm, chosen, n, links)
    # A contestant's beginning and its step follow each other
    beginnings: dict[str, list[float]] = {name: [] for name in made}
    steps: dict[str, list[float]] = {name: [] for name in made}
    for number in range(-1, chosen.repeats):  # the first round traces
        for name in rounds.turns(made, number):
            for found, work in ((beginnings, made[name].beginning), (steps, made[name].step)):
                taken = rounds.seconds_of(work, comm)
                found[name] += [taken] * (number >= 0)
    right = {name: verify(comm, one, made["synchronous"]) for name, one in made.items()}
    net = made["layers"].net
    layers = [(place, place + 1) for place in range(LAYERS)]
    times = pull_times(net.profile(), layers, net.weights, comm.topology, links)
    rows = []
    first = statistics.median(beginnings["at_once"]) / GAIN
    for name in made:
        solvers = pulls.PULLS if name == "batched" else {name} & pulls.PULLS.keys()
        batches = pulls.choose(times, tuple(solvers)).batches if solvers else ()
        rows.append(
            options.row(
                f"pull + forward, {name}",
                n,
                beginnings[name],
                right[name],
                limit_seconds=first if name == "batched" else None,
                simulated_seconds=pulls.finish_s(list(batches), times) if batches else None,
                gathers=len(batches),
            )
        )
    whole = statistics.median(steps["synchronous"]) * ALLOWED
    for name in made:
        limit = None if name == "synchronous" else whole
        row = options.row(f"step, {name}", n, steps[name], right[name], limit_seconds=limit)
        rows.append(row | {"simulated_seconds": None, "gathers": 0})
    return rows
