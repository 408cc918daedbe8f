#!/usr/bin/env python3
"""Claim: batched pulls hide behind the forward pass; sharded steps are no slower than synchronous.

    scripts/cluster up --nodes 4 --rate 200mbit --slots 1
    scripts/cluster run -- horovodrun -np 4 --gloo python scripts/bench_strategies.py --json s.jsonl
    scripts/cluster down

Each contestant trains a model of its own of `n` entries; they take turns, in another order each
round, and the slowest rank counts; the median is shown. Rows named "pull + forward" are the
beginning of a step: all weights are pulled, and the forward pass runs; `limit_seconds` of "batched"
is that of "at_once" over 1.3. Rows named "step" are whole training steps; their limit is 1.05 times
"synchronous".
Verified: after the last step all ranks have the same weights, and those of sharded training have
moved as those of the synchronous contestant, each entry to a thousandth of the largest movement in
its layer; no layer has stayed where it was.

Nodes of a virtual cluster share the machine's cores. So that each has a processor of its own, a
layer is a small matrix product and a wait: --forward seconds in all forward, twice that backward.
Where they lie is --shape: "even", or "front", as in a convolutional network, whose first layers
have most of the computation and the last few most of the weights. What a gather costs is measured
at the start, at two sizes. Options and columns: scripts/benchmark_options.py.
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
import benchmark_times
import keras
import numpy as np
import tensorflow as tf
from verify_weights import moved_alike

import tfcommx as cx
from tfcommx.comm.base import Comm
from tfcommx.planner.merging import pulls
from tfcommx.strategies import Sharded
from tfcommx.strategies.pull_times import pull_times
from tfcommx.terms import Link, Links, Profile, VariableProfile

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
        self.comm, self.net = comm, net
        scheme = cx.Scheme(bucket_bytes=4 * 2**20)
        self.optimizer = cx.DistributedOptimizer(make(), scheme, links=links, strategy=strategy)
        self.optimizer.build(net.weights)
        self.inputs = tf.random.stateless_normal([4, 256], [comm.rank, 7])
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

        self.step, self.beginning = step, beginning

    def seconds(self, work: Callable[[tf.Tensor], tf.Tensor]) -> float:
        """Return the time of the slowest rank. **Ranks:** all."""
        self.comm.gather_objects("ready")
        start = time.perf_counter()
        float(work(self.inputs))
        return max(self.comm.gather_objects(time.perf_counter() - start))


def measure_gathers(comm: Comm, n: int) -> Links:
    """Return a link that prices all-gathers as they were measured at two sizes. **Ranks:** all."""
    seconds = []
    sizes = [n // 50 // comm.topology.size, n // 2 // comm.topology.size]
    for size in sizes:
        own, taken = tf.ones([size]), []
        gather = tf.function(
            lambda one, size=size: comm.all_gather(one, "world", f"probe{size}"), autograph=False
        )
        for _ in range(6):
            comm.gather_objects("ready")
            start = time.perf_counter()
            gather(own)[0].numpy()
            taken.append(max(comm.gather_objects(time.perf_counter() - start)))
        seconds.append(min(taken[1:]))  # What else the machine does only adds
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


def measure(comm: Comm, chosen: Any, n: int) -> list[dict[str, Any]]:
    """Measure all contestants. **Ranks:** all."""
    links = measure_gathers(comm, n)
    made = contestants(comm, chosen, n, links)
    starts: dict[str, list[float]] = {name: [] for name in made}
    steps: dict[str, list[float]] = {name: [] for name in made}
    for number in range(-1, chosen.repeats):  # the first round traces
        for name in benchmark_times.turns(made, number):
            one = made[name]
            for kind, work in ((starts, one.beginning), (steps, one.step)):
                taken = one.seconds(work)
                if number >= 0:
                    kind[name].append(taken)
    right = {name: verify(comm, one, made["synchronous"]) for name, one in made.items()}
    net = made["layers"].net
    layers = [(place, place + 1) for place in range(LAYERS)]
    times = pull_times(net.profile(), layers, net.weights, comm.topology, links)
    rows = []
    first = statistics.median(starts["at_once"]) / GAIN
    whole = statistics.median(steps["synchronous"]) * ALLOWED
    for name in made:
        solvers = pulls.PULLS if name == "batched" else {name} & pulls.PULLS.keys()
        batches = pulls.choose(times, tuple(solvers)).batches if solvers else ()
        rows.append(
            benchmark_options.row(
                f"pull + forward, {name}",
                n,
                starts[name],
                right[name],
                limit_seconds=first if name == "batched" else None,
                simulated_seconds=pulls.finish_s(list(batches), times) if batches else None,
                gathers=len(batches),
            )
        )
    for name in made:
        rows.append(
            benchmark_options.row(
                f"step, {name}",
                n,
                steps[name],
                right[name],
                limit_seconds=None if name == "synchronous" else whole,
                simulated_seconds=None,
                gathers=0,
            )
        )
    return rows


def main() -> None:
    options = benchmark_options.parser(__doc__, [10_500_000], 5)
    options.add_argument("--forward", type=float, default=0.6, help="seconds of the forward pass")
    options.add_argument("--shape", choices=["even", "front"], default="front")
    options.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    chosen = options.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    comm = cx.init()
    rows = [one for n in chosen.sizes for one in measure(comm, chosen, n)]
    code = 0
    if cx.is_chief():
        own = {
            "simulated, ms": lambda one: (
                f"{one['simulated_seconds'] * 1e3:.0f}" if one["simulated_seconds"] else ""
            ),
            "gathers": lambda one: str(one["gathers"] or ""),
        }
        title = f"{comm.topology}, {chosen.shape}, {chosen.optimizer}, {chosen.forward} s forward"
        benchmark_options.print_table(rows, title, None, own)
        code = benchmark_options.finish(rows, chosen)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
