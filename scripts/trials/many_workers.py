#!/usr/bin/env python3
"""Question: on many nodes, does a low-bit sum lose less than selected entries of as few bytes?

    python scripts/trials/many_workers.py --workers 16 --methods dense momenta/int2 oktopk/0.115
    python scripts/trials/many_workers.py --workers 64 --seeds 2 --json many.jsonl

One process plays W workers, each a node of one rank, of configs/fashion_mnist.yaml in 6 epochs at
14 and 20 pixels, with the same joint batch of 512: simulated, because a machine has no room for 64
trainings. Data, network, rates, batches and codes are the product's; the exchange is arithmetic in
place of collectives, and one worker after the other updates batch normalisation's statistics.
Methods:

    dense            mean gradient, SGD with Nesterov momentum
    gradients/WIRE   every gradient entry in codes on both hops (`Scheme("asa", wire=WIRE)`)
    momenta/WIRE     the momentum in codes on both hops (LowBitSGD)
    allgather/K      the largest K (a share) of each worker's gradient + residual
    oktopk/K         the same, and of their sum the largest K alone: Ok-Topk (Li, Hoefler, 2022),
                     by exact thresholds; entries outside either selection stay in the residual

`bytes` is the share of plain Horovod's bytes that a worker sends: of codes with their steps, of
selected entries with 9.6 bits each (elias/int4 at 10 %; their values are not rounded here), 16 bits
for vectors. Values of selected entries are sent exactly, which favours them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfcommx.core import Topology
from tfcommx.core.wire_formats import dense_code_words
from tfcommx.kernels import low_bits
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.recipe import read

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "fashion_mnist.yaml"
METHODS = ("dense", "gradients/int4", "momenta/int2", "momenta/int1", "allgather/0.1")
METHODS = (*METHODS, "oktopk/0.115", "oktopk/0.23")
# Small pictures, and fewer epochs than the recipe has
SHORT = ["phases=[{epochs: 3, resolution: 14}, {epochs: 3, resolution: 20}]"]
JOINT_BATCH, MOMENTUM, SELECTED_BITS = 512, 0.9, 9.6

# Vectors of all workers [W, entries] -> their mean as it arrives
Exchange = Callable[[np.ndarray], np.ndarray]


class Codes:
    """A sum in codes on both hops, by the product's kernels."""

    def __init__(self, workers: int, entries: int, wire: str) -> None:
        self.workers, self.wire, self.entries = workers, wire, entries
        self.shard = -(-entries // workers)
        self.padded = self.shard * workers
        self.residuals = [tf.Variable(tf.zeros(self.padded)) for _ in range(workers)]

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Return the mean."""
        padded = np.pad(vectors, ((0, 0), (0, self.padded - self.entries))).astype(np.float32)
        sent = [
            tf.reshape(
                low_bits.write(one, residual, self.wire, self.shard, self.entries),
                [self.workers, -1],
            )
            for one, residual in zip(padded, self.residuals, strict=True)
        ]
        sums = []
        for owner, residual in enumerate(self.residuals):
            pieces, start = tf.concat([one[owner] for one in sent], 0), owner * self.shard
            real = self.entries - start
            added = low_bits.add_and_write(pieces, residual, self.wire, self.shard, start, real)
            sums.append(added)
        total = low_bits.read(tf.concat(sums, 0), self.wire, self.shard, 1 / self.workers)
        return total.numpy()[: self.entries]

    def bytes(self) -> float:
        """Return the bytes that a worker sends."""
        words = sum(dense_code_words(self.shard, self.wire))
        return 2 * 4 * words * (self.workers - 1)


class Selected:
    """The largest entries of each worker, and of their sum alone if it is Ok-Topk's."""

    def __init__(self, workers: int, entries: int, share: float, of_sum: bool) -> None:
        self.workers, self.k, self.of_sum = workers, round(share * entries), of_sum
        self.residuals = np.zeros([workers, entries], np.float32)

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Return the mean."""
        waiting = self.residuals + vectors
        chosen = largest(np.abs(waiting), self.k)
        total = np.where(chosen, waiting, 0).sum(0)
        if self.of_sum:
            arrives = largest(np.abs(total)[None], self.k)
            chosen, total = chosen & arrives, np.where(arrives[0], total, 0)
        self.residuals = np.where(chosen, 0, waiting)
        return total / self.workers

    def bytes(self) -> float:
        """Return the bytes that a worker sends: to all others, or to owners and back."""
        entries = 2 * self.k / self.workers if self.of_sum else self.k
        return entries * SELECTED_BITS / 8 * (self.workers - 1)


def largest(magnitudes: np.ndarray, k: int) -> np.ndarray:
    """Return in each row where the k largest are; more if some are equal."""
    place = magnitudes.shape[1] - k
    return magnitudes >= np.partition(magnitudes, place, axis=1)[:, place, None]


def exchange_of(method: str, workers: int, entries: int) -> Codes | Selected | None:
    """Return how the entries of matrices travel; None: as they are."""
    name, _, how = method.partition("/")
    if name == "dense":
        return None
    if name in ("gradients", "momenta"):
        return Codes(workers, entries, how)
    return Selected(workers, entries, float(how), of_sum=name == "oktopk")


def train(method: str, workers: int, seed: int, settings: list[str]) -> dict[str, object]:
    """Train by a method; return its row."""
    start, recipe = time.monotonic(), read(RECIPE, [*settings, f"seed={seed}"])
    data = recipe.data.build(DataRank(Topology(1, 1), 0, seed, 1))
    objective = recipe.task.build(data)
    keras.utils.set_random_seed(seed)
    model, loss = recipe.build_model(objective), objective.loss()
    variables = [one.value for one in model.trainable_variables]
    sizes = [int(np.prod(one.shape)) for one in variables]
    large = [one.shape.rank > 1 and np.prod(one.shape) >= 1024 for one in variables]
    is_sent = np.repeat(large, sizes)

    @tf.function(reduce_retracing=True)
    def gradient(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        found = tape.gradient(value, variables)
        return tf.concat([tf.reshape(one, [-1]) for one in found], 0)

    exchange = exchange_of(method, workers, int(is_sent.sum()))
    momentum, scores = np.zeros(sum(sizes), np.float32), []
    decays = [recipe.optimizer.weight_decay * (one.shape.rank > 1) for one in variables]
    steps_of_first = data.steps(JOINT_BATCH, recipe.phases[0].resolution)
    for epoch, phase in enumerate(recipe.phase_of_epoch()):
        batches = data.train(JOINT_BATCH, phase.resolution, range(epoch, epoch + 1))
        steps = data.steps(JOINT_BATCH, phase.resolution)
        for step, (x, y) in enumerate(objective.targets(batches).take(steps)):
            rate = recipe.rate(epoch, step * steps_of_first / steps, steps_of_first, 4)
            parts = zip(tf.split(x, workers), tf.split(y, workers), strict=True)
            gradients = np.stack([gradient(*part).numpy() for part in parts])
            now = MOMENTUM * momentum - rate * gradients.mean(0)
            if exchange is not None:
                own = gradients[:, is_sent]
                if method.startswith("momenta"):
                    now[is_sent] = -rate * exchange(own - MOMENTUM * momentum[is_sent] / rate)
                else:
                    now[is_sent] = MOMENTUM * momentum[is_sent] - rate * exchange(own)
            moved = MOMENTUM * now + (now - MOMENTUM * momentum)
            momentum, place = now, 0
            for variable, size, decay in zip(variables, sizes, decays, strict=True):
                shrink = 1 - rate * decay
                update = moved[place : place + size].reshape(variable.shape)
                variable.assign(variable * shrink + update)
                place += size
        score = objective.scorer(model)(data.test(1000, phase.resolution), lambda item: [item])
        scores.append(round(score["test_accuracy"], 4))
        print(f"{method} x {workers}, seed {seed}, epoch {epoch + 1}: {scores[-1]}", flush=True)
    data.close()
    dense = 2 * 4 * sum(sizes) * (workers - 1) / workers
    vectors = 2 * 2 * int((~is_sent).sum()) * (workers - 1) / workers
    share = 1.0 if exchange is None else (exchange.bytes() + vectors) / dense
    return {
        "method": method,
        "workers": workers,
        "seed": seed,
        "bytes_share": share,
        "test_accuracy": scores,
        "seconds": time.monotonic() - start,
    }


def main() -> int:
    """Train by each method and seed; write one object a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--workers", type=int, default=16, help="a divisor of 512")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=SHORT, metavar="PLACE=VALUE", dest="settings")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    for seed in range(options.seeds):
        for method in options.methods:
            row = train(method, options.workers, seed, options.settings)
            print(json.dumps(row), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
