#!/usr/bin/env python3
"""Question: on many nodes, does a low-bit sum lose less than selected entries of as few bytes?

    python scripts/trials/many_workers.py --workers 16 --methods dense momenta/int2 oktopk/0.115
    python scripts/trials/many_workers.py --workers 64 --seeds 2 --json many.jsonl
    python scripts/trials/many_workers.py --recipe translate --workers 8 --methods momenta/int1

One process plays W workers, each a node of one rank: simulated, because a machine has no room for
64 trainings. Data, network, rates, batches and codes are the product's; the exchange is arithmetic
in place of collectives, and one worker after the other updates batch normalisation's statistics.
Recipes:

    fashion          configs/fashion_mnist.yaml in 6 epochs at 14 and 20 pixels, SGD with Nesterov
                     momentum, a joint batch of 512 for any number of workers
    translate        configs/translate_miniature.yaml, Adam, 768 word pieces a worker

Methods:

    dense            mean gradient
    gradients/WIRE   every gradient entry in codes on both hops (`Scheme("asa", wire=WIRE)`)
    momenta/WIRE     the momentum in codes on both hops: LowBitSGD, or OneBitAdam, which learns its
                     second moments by gradients in int4 until --freeze-after; in another wire by
                     momenta/int1/int8
    allgather/K      the largest K (a share) of each worker's gradient + residual
    oktopk/K         the same, and of their sum the largest K alone: Ok-Topk (Li, Hoefler, 2022),
                     by exact thresholds; entries outside either selection stay in the residual

Selected values are sent exactly, which favours them, or rounded: allgather/0.1/int4 to multiples of
the step of a block of 32, as `elias/int4` does; allgather/0.17/int2 to two magnitudes and a sign,
which no format of the product has. `bytes_share` is the share of plain Horovod's bytes that a
worker sends, in the mean over all steps: codes with their steps, indices of selected entries as
`elias` writes them, values in the bits named (4 if none are), and 16 bits for vectors.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.core import Topology
from tfcommx.core.wire_formats import CODE_BLOCK, INDEX_WORDS, dense_code_words
from tfcommx.kernels import low_bits
from tfcommx.optimizers.frozen_moments import FLOOR
from tfcommx.recipes.families import DataRank, Objective
from tfcommx.recipes.recipe import Phase, Recipe, read

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
METHODS = (
    *("dense", "gradients/int4", "momenta/int2", "momenta/int1", "allgather/0.1"),
    *("oktopk/0.115", "oktopk/0.23"),
)
# Recipe -> its file, and changes: small pictures and fewer epochs; no translations, which only BLEU
# needs
FASHION, TRANSLATE = "fashion", "translate"
RECIPES = {
    FASHION: (
        "fashion_mnist.yaml",
        ["phases=[{epochs: 3, resolution: 14}, {epochs: 3, resolution: 20}]"],
    ),
    TRANSLATE: (
        "translate_miniature.yaml",
        ["phases=[{epochs: 6, resolution: 32}]", "task.bleu_sentences=0"],
    ),
}
JOINT_BATCH, MOMENTUM = 512, 0.9

# Vectors of all workers [W, entries] -> their mean as it arrives
Mean = Callable[[np.ndarray], np.ndarray]


class Dense:
    """A mean of float32."""

    def __init__(self, workers: int, entries: int) -> None:
        self.workers, self.entries = workers, entries

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Return the mean."""
        return vectors.mean(0)

    def bytes(self) -> float:
        """Return the bytes that a worker sends."""
        return 2 * 4 * self.entries * (self.workers - 1) / self.workers


class Codes:
    """A sum in codes on both hops, by the product's kernels.

    Args:
        before: another sum of the same entries, whose residuals this one continues.
    """

    def __init__(self, workers: int, entries: int, wire: str, before: Codes | None = None) -> None:
        self.workers, self.wire, self.entries = workers, wire, entries
        self.shard = -(-entries // workers)
        self.padded = self.shard * workers
        fresh = [tf.Variable(tf.zeros(self.padded)) for _ in range(workers if not before else 0)]
        self.residuals: list[tf.Variable] = before.residuals if before else fresh

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
    """The largest entries of each worker, and of their sum alone if it is Ok-Topk's.

    Args:
        bits: of a value, 4 or 2; None: sent exactly.
    """

    def __init__(
        self, workers: int, entries: int, share: float, bits: int | None, of_sum: bool
    ) -> None:
        self.workers, self.entries, self.k = workers, entries, round(share * entries)
        self.bits, self.of_sum = bits, of_sum
        self.residuals = np.zeros([workers, entries], np.float32)

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Return the mean."""
        waiting = self.residuals + vectors
        chosen = largest(np.abs(waiting), self.k)
        sent = np.where(chosen, waiting, 0)
        if self.bits:
            for row, own in zip(sent, chosen, strict=True):
                row[own] = rounded(row[own], self.bits)
        total = sent.sum(0)
        if self.of_sum:
            arrives = largest(np.abs(total)[None], self.k)
            sent, total = np.where(arrives, sent, 0), np.where(arrives[0], total, 0)
        self.residuals = waiting - sent
        return total / self.workers

    def bytes(self) -> float:
        """Return the bytes that a worker sends: to all others, or to owners and back."""
        words = sum(INDEX_WORDS["elias"](self.k, self.entries))
        buffer = 4 * words + self.k * ((self.bits or 4) + 16 / CODE_BLOCK) / 8
        return buffer * (2 / self.workers if self.of_sum else 1) * (self.workers - 1)


def largest(magnitudes: np.ndarray, k: int) -> np.ndarray:
    """Return in each row where the k largest are; more if some are equal."""
    place = magnitudes.shape[1] - k
    return magnitudes >= np.partition(magnitudes, place, axis=1)[:, place, None]


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """Round values in blocks of 32: to 15 multiples of a step, or to two magnitudes and a sign.

    >>> rounded(np.array([1, -1, 3, -3], np.float32), 2)
    array([ 1., -1.,  3., -3.], dtype=float32)
    """
    blocks = np.pad(values, (0, -len(values) % CODE_BLOCK)).reshape(-1, CODE_BLOCK)
    sizes = np.abs(blocks)
    if bits == 4:
        step = np.maximum(sizes.max(1, keepdims=True) / 7, np.finfo(np.float32).tiny)
        result = np.round(blocks / step) * step
    else:
        high = sizes > 0.6 * sizes.max(1, keepdims=True)
        result = np.zeros_like(blocks)
        for part in (high, ~high & (sizes > 0)):
            count = np.maximum(part.sum(1, keepdims=True), 1)
            mean = np.where(part, sizes, 0).sum(1, keepdims=True) / count
            result = np.where(part, np.sign(blocks) * mean, result)
    return result.reshape(-1)[: len(values)].astype(np.float32)


def exchange_of(method: str, workers: int, entries: int) -> Dense | Codes | Selected:
    """Return how the entries of matrices travel, after the first phase of OneBitAdam."""
    name, *how = method.split("/")
    if name == "dense":
        return Dense(workers, entries)
    if name in ("gradients", "momenta"):
        return Codes(workers, entries, how[0])
    bits = int(how[1].removeprefix("int")) if len(how) > 1 else None
    return Selected(workers, entries, float(how[0]), bits, of_sum=name == "oktopk")


class Nesterov:
    """SGD with Nesterov momentum, as Keras updates; by momenta as LowBitSGD does.

    Args:
        sent: bool [entries], True where `exchange` carries the entry.
        exchange: of those entries.
        momenta: momenta are exchanged in place of gradients.
    """

    def __init__(self, sent: np.ndarray, exchange: Mean, momenta: bool) -> None:
        self.sent, self.exchange, self.momenta = sent, exchange, momenta
        self.momentum = np.zeros(sent.size, np.float32)

    def update(self, gradients: np.ndarray, rate: float) -> np.ndarray:
        """Return the change of the weights, without weight decay."""
        before, sent = self.momentum, self.sent
        now = MOMENTUM * before - rate * gradients.mean(0)
        own = gradients[:, sent]
        if self.momenta:
            now[sent] = -rate * self.exchange(own - MOMENTUM * before[sent] / rate)
        else:
            now[sent] = MOMENTUM * before[sent] - rate * self.exchange(own)
        self.momentum = now
        return MOMENTUM * now + (now - MOMENTUM * before)


class Adam:
    """Adam, as Keras updates; by momenta as OneBitAdam does.

    Args:
        sent, exchange: as of Nesterov.
        learning: exchange of gradients until the second moments are frozen.
        freeze_after: updates, after which momenta are exchanged; None: never.
        starts: int [variables], the first entry of each variable.
        options: beta_1, beta_2 and epsilon.
    """

    def __init__(
        self,
        sent: np.ndarray,
        exchange: Mean,
        learning: Mean,
        freeze_after: int | None,
        starts: np.ndarray,
        options: Any,
    ) -> None:
        self.sent, self.exchange, self.learning = sent, exchange, learning
        self.freeze_after, self.starts, self.options = freeze_after, starts, options
        self.step, self.first, self.second = 0, *np.zeros((2, sent.size), np.float32)
        self.frozen = np.zeros(0)

    def update(self, gradients: np.ndarray, rate: float) -> np.ndarray:
        """Return the change of the weights."""
        beta_1, beta_2, sent = self.options.beta_1, self.options.beta_2, self.sent
        freezes = self.freeze_after is not None and self.step >= self.freeze_after
        mean, own = gradients.mean(0), gradients[:, sent]
        if freezes and not self.frozen.size:
            self.frozen = self._floored() / (1 - beta_2**self.step)
        if not freezes:
            mean[sent] = self.learning(own)
        momentum = beta_1 * self.first + (1 - beta_1) * mean
        if freezes:
            carried = (beta_1 / (1 - beta_1) * self.first[sent]).astype(np.float32)
            momentum[sent] = (1 - beta_1) * self.exchange(own + carried)
        self.first, self.second = momentum, beta_2 * self.second + (1 - beta_2) * mean**2
        self.step += 1
        variance = self.second / (1 - beta_2**self.step)
        if freezes:
            variance[sent] = self.frozen[sent]
        moved = momentum / (1 - beta_1**self.step) / (np.sqrt(variance) + self.options.epsilon)
        if freezes:
            moved[sent] /= np.maximum(np.abs(moved[sent]), 1)
        return -rate * moved

    def _floored(self) -> np.ndarray:
        """Return the second moments, at least a share of the mean of their variable's nonzero."""
        parts = np.split(self.second, self.starts[1:])
        means = [part[part > 0].mean() if part.any() else 0 for part in parts]
        floors = [np.full(part.size, FLOOR * mean) for part, mean in zip(parts, means, strict=True)]
        return np.maximum(self.second, np.concatenate(floors))


def steps_of(
    recipe: Recipe, objective: Objective, data: Any, phase: Phase, epoch: int, workers: int
) -> Iterator[list[tuple[Any, Any]]]:
    """Yield each step's batches, one for each worker.

    Args:
        data: of one process, or of every worker.
    """
    epochs = range(epoch, epoch + 1)
    if isinstance(data, list):
        batch = recipe.batch(phase)
        served = (one.train(batch, phase.resolution, epochs) for one in data)
        yield from map(list, zip(*served, strict=True))
        return
    batches = objective.targets(data.train(JOINT_BATCH, phase.resolution, epochs))
    for x, y in batches.take(data.steps(JOINT_BATCH, phase.resolution)):
        yield list(zip(tf.split(x, workers), tf.split(y, workers), strict=True))


def train(method: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Train by a method; return its row."""
    start, workers, (file, changes) = time.monotonic(), options.workers, RECIPES[options.recipe]
    recipe = read(CONFIGS / file, [*(options.settings or changes), f"seed={seed}"])
    alone = recipe.data.build(DataRank(Topology(1, 1), 0, seed, 1))
    data, batch = alone, JOINT_BATCH
    if options.recipe == TRANSLATE:  # Sentences are batched by length, for all workers together
        ranks = [DataRank(Topology(workers, 1), rank, seed, 1) for rank in range(workers)]
        data, batch = [recipe.data.build(rank) for rank in ranks], recipe.batch(recipe.phases[0])
    objective = recipe.task.build(alone)
    keras.utils.set_random_seed(seed)
    model, loss = recipe.build_model(objective), objective.loss()
    variables = [one.value for one in model.trainable_variables]
    sizes = [int(np.prod(one.shape)) for one in variables]
    large = [one.shape.rank > 1 and np.prod(one.shape) >= 1024 for one in variables]
    sent, starts = np.repeat(large, sizes), np.cumsum([0, *sizes[:-1]])

    @tf.function(reduce_retracing=True)
    def gradient(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        found = map(tf.convert_to_tensor, tape.gradient(value, variables))
        return tf.concat([tf.reshape(one, [-1]) for one in found], 0)

    exchange = learning = exchange_of(method, workers, int(sent.sum()))
    momenta, freeze_after = method.startswith("momenta"), None
    if options.recipe == FASHION:
        optimizer: Nesterov | Adam = Nesterov(sent, exchange, momenta)
    else:
        if momenta:
            wire, freeze_after = (*method.split("/"), "int4")[2], options.freeze_after
            learning = Codes(workers, int(sent.sum()), wire, before=exchange)
        optimizer = Adam(sent, exchange, learning, freeze_after, starts, recipe.optimizer)
    decays = [recipe.optimizer.weight_decay * (one.shape.rank > 1) for one in variables]
    first = data[0] if isinstance(data, list) else data
    steps_of_first, taken, scores = first.steps(batch, recipe.phases[0].resolution), 0, []
    for epoch, phase in enumerate(recipe.phase_of_epoch()):
        steps = first.steps(batch, phase.resolution)
        for step, parts in enumerate(steps_of(recipe, objective, data, phase, epoch, workers)):
            counted = workers if options.recipe == TRANSLATE else 4
            rate = recipe.rate(epoch, step * steps_of_first / steps, steps_of_first, counted)
            update = optimizer.update(np.stack([gradient(*part).numpy() for part in parts]), rate)
            for variable, size, place, decay in zip(variables, sizes, starts, decays, strict=True):
                own = update[place : place + size].reshape(variable.shape).astype(np.float32)
                variable.assign(variable * (1 - rate * decay) + own)
            taken += 1
        score = objective.scorer(model)(alone.test(1000, phase.resolution), lambda item: [item])
        scores.append(round(score["test_accuracy"], 4))
        print(f"{method} x {workers}, seed {seed}, epoch {epoch + 1}: {scores[-1]}", flush=True)
    alone.close()
    learnt = min(freeze_after or 0, taken)
    each = (learnt * learning.bytes() + (taken - learnt) * exchange.bytes()) / taken
    vectors = 2 * 2 * int((~sent).sum()) * (workers - 1) / workers
    share = (each + vectors) / Dense(workers, sum(sizes)).bytes()
    return {
        "method": method,
        "recipe": options.recipe,
        "workers": workers,
        "seed": seed,
        "bytes_share": 1.0 if method == "dense" else share,
        "test_accuracy": scores,
        "seconds": time.monotonic() - start,
    }


def main() -> int:
    """Train by each method and seed; write one object a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, default=FASHION)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--workers", type=int, default=16, help="fashion: a divisor of 512")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--freeze-after", type=int, default=67, help="updates of OneBitAdam")
    parser.add_argument("--set", nargs="+", metavar="PLACE=VALUE", dest="settings")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    for seed in range(options.seeds):
        for method in options.methods:
            row = train(method, seed, options)
            print(json.dumps(row), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
