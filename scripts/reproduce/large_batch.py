#!/usr/bin/env python3
"""Claim: at a joint batch of 4,096 LARS reaches what tuned SGD reaches, and LAMB what AdamW does.

    python scripts/reproduce/large_batch.py --json large_batch.jsonl          # 1.5 CPU hours
    python scripts/reproduce/large_batch.py --json large_batch.jsonl   # goes on where it was ended
    python scripts/reproduce/large_batch.py --epochs 2 --train 8192 --seeds 1 --pairs lars   # a try

Fashion-MNIST, the small network of `make demo`, 15 epochs; warm-up over the first 2 epochs, then
cosine decay. Both of a pair get the same grid of rates, momentum 0.9 and their own weight decay.
Each rate is tried with seed 0; the one with the highest accuracy on 5,000 training images kept back
is run with the other seeds. What counts is the mean test accuracy of the seeds at that rate. One
process takes the whole batch: wrapped on p ranks with 4,096 / p each, LARS and LAMB take the same
steps (tests/ranks/optimizer/test_layerwise_on_ranks.py), except for batch normalisation.

**Source:** You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017); You et
al., "Large Batch Optimization for Deep Learning" (2020).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import tfcommx.cli.load_quietly  # noqa: F401

# isort: split
import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from tfcommx.optimizers import LAMB, LARS
from tfcommx.recipes.datasets.fashion_mnist import fetch, load
from tfcommx.recipes.models.small_cnn import small_cnn

KEPT_BACK = 5000
Make = Callable[[keras.optimizers.schedules.LearningRateSchedule], keras.optimizers.Optimizer]

# Of each pair: the rates of both, then (name, optimizer) of the common one and of ours
PAIRS: dict[str, tuple[tuple[float, ...], dict[str, Make]]] = {
    "lars": (
        (0.25, 0.5, 1.0, 2.0, 4.0),
        {
            "sgd": lambda rate: _not_decayed(
                keras.optimizers.SGD(rate, momentum=0.9, weight_decay=5e-4)
            ),
            "lars": lambda rate: LARS(
                rate, momentum=0.9, weight_decay=5e-4, trust_coefficient=0.02
            ),
        },
    ),
    "lamb": (
        (0.0025, 0.005, 0.01, 0.02, 0.04),
        {
            "adamw": lambda rate: _not_decayed(keras.optimizers.AdamW(rate, weight_decay=0.01)),
            "lamb": lambda rate: LAMB(rate, weight_decay=0.01, epsilon=1e-6),
        },
    ),
}


def _not_decayed(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer


def accuracies(
    make: Make, peak: float, seed: int, data: tuple[np.ndarray, ...], chosen: argparse.Namespace
) -> tuple[float, float]:
    """Train once; return the accuracies on the images kept back and on the test images."""
    x, y, test_x, test_y = data
    keras.utils.set_random_seed(seed)
    keep, train = slice(0, KEPT_BACK), slice(KEPT_BACK, KEPT_BACK + chosen.train)
    batch = min(chosen.batch, len(x[train]))
    steps = chosen.epochs * (len(x[train]) // batch)
    warm_up = min(2, chosen.epochs - 1) * steps // chosen.epochs
    rate = keras.optimizers.schedules.CosineDecay(
        peak / (warm_up + 1), max(1, steps - warm_up), warmup_target=peak, warmup_steps=warm_up
    )
    net = small_cnn((16, 32, 64), 1, 10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(make(rate), loss=loss, metrics=["accuracy"], jit_compile=False)
    whole = len(x[train]) // batch * batch
    net.fit(x[train][:whole], y[train][:whole], batch_size=batch, epochs=chosen.epochs, verbose=0)
    options = {"batch_size": 1000, "verbose": 0}
    _, kept = net.evaluate(x[keep], y[keep], **options)
    _, test = net.evaluate(test_x, test_y, **options)
    return kept, test


class Runs:
    """The runs of this call, and those that the file of an earlier one holds."""

    def __init__(self, data: tuple[np.ndarray, ...], chosen: argparse.Namespace) -> None:
        self.data, self.chosen, self.file = data, chosen, chosen.json
        text = self.file.read_text() if self.file and self.file.exists() else ""
        self.done = [json.loads(line) for line in text.splitlines()]

    def row(self, name: str, make: Make, peak: float, seed: int) -> dict:
        """Train, if the file has no such run; return what it reached."""
        what = {"name": name, "rate": peak, "seed": seed}
        what |= {key: getattr(self.chosen, key) for key in ("batch", "epochs", "train")}
        for row in self.done:
            if what.items() <= row.items():
                return row
        kept, test = accuracies(make, peak, seed, self.data, self.chosen)
        row = {**what, "kept_back": kept, "test": test}
        self.done.append(row)
        print(json.dumps(row), flush=True)
        if self.file:
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row


def compare(pair: str, runs: Runs) -> dict[str, list[dict]]:
    """Tune and run both of a pair; return the runs at the chosen rate of each."""
    rates, both = PAIRS[pair]
    best = {}
    for name, make in both.items():
        tried = [runs.row(name, make, peak, 0) for peak in rates]
        rate = max(tried, key=lambda row: row["kept_back"])["rate"]
        best[name] = [runs.row(name, make, rate, seed) for seed in range(runs.chosen.seeds)]
    return best


def show(best: dict[str, list[dict]], pair: str) -> None:
    """Print the mean test accuracy of each one's best rate."""
    table = Table(title=f"{pair}: test accuracy at the rate chosen")
    for heading in ("optimizer", "rate", "mean", "of seeds"):
        table.add_column(heading)
    for name, rows in best.items():
        tests = [row["test"] for row in rows]
        each = ", ".join(f"{one:.4f}" for one in tests)
        table.add_row(name, f"{rows[0]['rate']:g}", f"{statistics.mean(tests):.4f}", each)
    Console().print(table)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--batch", type=int, default=4096, help="joint batch")
    options.add_argument("--epochs", type=int, default=15)
    options.add_argument("--train", type=int, default=55000, help="training images, at most 55,000")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    options.add_argument(
        "--json", type=Path, help="add one object a line; runs that it holds are not run again"
    )
    chosen = options.parse_args()
    x, y, test_x, test_y = load(fetch(None))
    order = np.random.default_rng(0).permutation(len(x))
    data = tuple(
        one.reshape(-1, 28, 28, 1).astype(np.float32) if one.ndim > 1 else one
        for one in (x[order], y[order], test_x, test_y)
    )
    runs = Runs(data, chosen)
    for pair in chosen.pairs:
        show(compare(pair, runs), pair)


if __name__ == "__main__":
    main()
