"""Claim: with elastic averaging a slow rank slows nobody, and the centre is as good as dense sync.

    python scripts/bench elastic_averaging --json elastic.jsonl --png elastic.png

Peer: synchronous training, dense and MSTopK, on the same three ranks, which MPI starts.

1. Steps that take 100 ms of sleep in the place of computing, so that ranks do not share cores, and
   exchange n float32 weights: seconds of a step of ranks 0 and 1 while rank 2 takes as long, or
   `--slowed` times as long, in turn. A snapshot goes out in one step of four, so four consecutive
   steps count together: `seconds` is the median of their means, `mean_seconds` and `p95_seconds`
   are of the same. Limit: 1.05 times the seconds of the first. Other rows are not judged.
2. Fashion-MNIST, a dense network (784-128-10), SGD with momentum 0.9, each rank a third of the
   samples: test accuracy over the bytes that all ranks have sent, for elastic averaging (its
   centre) and for synchronous training, dense and MSTopK, at the same number of samples. The
   synchronous ones run at the rate of one rank and at three times that, and the better one counts.
   An accuracy is the mean of the last three of eight looks, and that the mean over `--seeds`.
   Verified: dense training reaches `--floor`, and the centre is within a point of it. MSTopK is not
   judged.

`bytes` counts what all ranks have sent to others. `accuracies` has the seeds' own, `curve` [bytes,
accuracy] along the first seed's run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from bench import options, ranks, rounds
from bench.peers import bare_step, threads

import tfcommx as cx
from tfcommx.core import replacing
from tfcommx.optim.centre import with_centre
from tfcommx.recipes.datasets.fashion_mnist import fetch, load
from tfcommx.strategies import ElasticAveraging, Strategy, Synchronous

STEP_SECONDS = 0.1
ROUNDS = 3
EVERY = 4  # steps between two snapshots in part 1
MAX_SLOWER = 1.05
POINTS = 0.01  # of accuracy
BATCH = 64
LOOKS, LAST = 8, 3  # at the accuracy in a run; those that count
DENSE = cx.Scheme()
MSTOPK = cx.Scheme("allgather", "mstopk", 0.01)


class Steps:
    """Steps of one strategy, on variables of `entries` float32."""

    def __init__(self, entries: int, strategy: Strategy) -> None:
        weight = keras.Variable(tf.zeros([entries]), name="w")
        self.optimizer = cx.DistributedOptimizer(
            keras.optimizers.SGD(0.1), cx.Scheme(), strategy=strategy
        )
        self.alone = isinstance(strategy, ElasticAveraging)
        gradient = tf.fill([entries], 1e-3 * cx.rank())
        self.step = bare_step(self.optimizer, [weight], [gradient])
        self.step()

    def seconds(self, slowed: float, lasts: float) -> list[float]:
        """Take steps for so many seconds; return ranks 0 and 1's, as means of EVERY steps."""
        mine = STEP_SECONDS * (slowed if cx.rank() == 2 else 1)
        # Equally many steps on all ranks, as long as the slowest takes, if they wait for each other
        limit = 10**9 if self.alone else int(lasts / STEP_SECONDS / slowed)
        cx.collectives.current().gather_objects("all begin")
        end, taken = time.monotonic() + lasts, []
        while (self.alone and time.monotonic() < end) or (not self.alone and len(taken) < limit):
            start = time.perf_counter()
            time.sleep(mine)
            self.step()
            taken.append(time.perf_counter() - start)
        cx.take_centre(keras.Sequential(), self.optimizer)
        first, second, *_ = cx.collectives.current().gather_objects(taken)
        return [one for rank in (first, second) for one in rounds.of_windows(rank, EVERY)]


def bytes_of_all(optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> float:
    """Return what all ranks have sent to others, as rank 0 knows it."""
    mine = optimizer.exchanger.traffic()["bytes_between_nodes"]
    # Rank 0 has answered each snapshot by as many bytes; collectives count the mean over the ranks
    return mine * (2 if isinstance(strategy, ElasticAveraging) else cx.size())


def train(
    data: tuple[np.ndarray, ...],
    epochs: int,
    strategy: Strategy,
    scheme: cx.Scheme,
    rate: float,
    seed: int,
) -> tuple[list[list[float]], float]:
    """Train once; return rank 0's [bytes, accuracy] along the run, and the seconds."""
    x, y, test_x, test_y = data
    keras.utils.set_random_seed(4 + seed)
    net = keras.Sequential(
        [
            keras.layers.Input((784,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = cx.DistributedOptimizer(
        keras.optimizers.SGD(rate, momentum=0.9), scheme, strategy=strategy
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    before = bytes_of_all(optimizer, strategy)
    curve: list[list[float]] = []

    class Look(keras.callbacks.Callback):
        """Evaluates the centre, or the common weights, on rank 0."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps, taken = self.params["steps"] * self.params["epochs"], int(optimizer.iterations)
            # The last step's is at the end
            if cx.is_chief() and taken % max(1, steps // LOOKS) == 0 and taken < steps:
                self.look()

        def on_train_end(self, logs: Any = None) -> None:
            if cx.is_chief():
                self.look()

        def look(self) -> None:
            sent = bytes_of_all(optimizer, strategy) - before
            with with_centre(net):
                answers = np.argmax(net(test_x, training=False), axis=1)
            curve.append([sent, float(np.mean(answers == test_y))])

    start = time.monotonic()
    callbacks = [cx.callbacks.BroadcastState(), Look()]
    net.fit(x, y, BATCH, epochs=epochs, verbose=0, callbacks=callbacks)
    return curve, time.monotonic() - start


def prepare(samples: int) -> tuple[np.ndarray, ...]:
    """Return this rank's part of the training samples, and all test samples."""
    x, y, test_x, test_y = load(fetch(None))
    chosen = np.random.default_rng(1).permutation(len(x))[:samples][cx.rank() :: cx.size()]
    chosen = chosen[: samples // cx.size() // BATCH * BATCH]

    def flat(pictures: np.ndarray) -> np.ndarray:
        return pictures.reshape(len(pictures), -1).astype("float32") / 255

    return flat(x[chosen]), y[chosen].astype("int32"), flat(test_x), test_y


def accuracy_of(curve: list[list[float]]) -> float:
    """Return the mean accuracy of the last looks: single ones differ by as much as is judged."""
    return statistics.fmean(accuracy for _, accuracy in curve[-LAST:])


def is_as_good(accuracy: float, dense: float, floor: float) -> bool:
    """Judge the centre's accuracy beside dense training's, which must have learned by itself."""
    return dense >= floor and accuracy > dense - POINTS


def accuracy_rows(samples: int, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in all ways, with each seed; return a row of each way. **Ranks:** all."""
    rate, epochs = chosen.learning_rate, chosen.repeats
    data = prepare(samples)
    ways: dict[str, tuple[Strategy, cx.Scheme, tuple[float, ...]]] = {
        "synchronous, dense": (Synchronous(), DENSE, (rate, 3 * rate)),
        "synchronous, MSTopK": (Synchronous(), MSTOPK, (rate, 3 * rate)),
        "elastic, every 4": (ElasticAveraging(every=4), DENSE, (rate,)),
        "elastic, every 10": (ElasticAveraging(every=10), DENSE, (rate,)),
        "elastic, every 40": (ElasticAveraging(every=40), DENSE, (rate,)),
    }
    rows, dense = [], None
    for name, (strategy, scheme, rates) in ways.items():
        tried = []
        for one in rates:
            runs = [
                train(data, epochs, strategy, scheme, one, seed) for seed in range(chosen.seeds)
            ]
            curves, seconds = zip(*cx.collectives.current().gather_objects(runs)[0], strict=True)
            own = [accuracy_of(curve) for curve in curves]
            tried.append((statistics.fmean(own), own, curves[0], statistics.fmean(seconds), one))
        accuracy, own, curve, seconds, best = max(tried)
        dense = accuracy if dense is None else dense
        sent = curve[-1][0]
        rows.append(
            options.row(
                name,
                samples,
                seconds,
                is_as_good(accuracy, dense, chosen.floor) if scheme == DENSE else None,
                density=scheme.density,
                accuracy=accuracy,
                accuracies=own,
                bytes=sent,
                rate=best,
                epochs=epochs,
                curve=curve,
            )
        )
    return rows


def speed_rows(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time steps with ranks alike and with a slow one. **Ranks:** all."""
    for name, strategy in (("elastic", ElasticAveraging(every=EVERY)), ("sync", Synchronous())):
        steps = Steps(chosen.entries, strategy)
        found: dict[str, list[float]] = {"ranks alike": [], "rank 2 slow": []}
        for _ in range(ROUNDS):
            for kind, slowed in (("ranks alike", 1.0), ("rank 2 slow", chosen.slowed)):
                found[kind] += steps.seconds(slowed, chosen.lasts)
        usual = statistics.median(found["ranks alike"])
        for kind, seconds in found.items():
            median, judged = statistics.median(seconds), (name, kind) == ("elastic", "rank 2 slow")
            limit = MAX_SLOWER * usual if judged else None
            yield options.row(
                f"{name}, {kind}",
                chosen.entries,
                median,
                median < limit if judged and not chosen.smoke else None,
                limit_seconds=limit,
                mean_seconds=float(np.mean(seconds)),
                p95_seconds=float(np.percentile(seconds, 95)),
                steps=EVERY * len(seconds),
            )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for one in rows:
        if "curve" in one:
            sent, accuracy = zip(*one["curve"], strict=True)
            axes.plot([b / 1e6 for b in sent], accuracy, "o-", markersize=3, label=one["name"])
    axes.set(xscale="log", xlabel="MB sent by all ranks", ylabel="test accuracy")
    axes.legend()
    with replacing(path) as part:
        figure.savefig(part, dpi=120)


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, [60_000], 2, "training samples in all", "epochs of training")
    found.add_argument(
        "--part", type=int, choices=(1, 2), help="measure this part alone; default: both"
    )
    found.add_argument("--entries", type=int, default=1_000_000, help="weights in part 1")
    found.add_argument("--slowed", type=float, default=3.0, help="times that rank 2 is slowed")
    found.add_argument("--lasts", type=float, default=10.0, help="seconds of a round in part 1")
    found.add_argument("--learning-rate", type=float, default=0.05, help="of one rank")
    found.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="runs of each way in part 2, seven for each seed; default: %(default)s",
    )
    found.add_argument(
        "--floor",
        type=float,
        default=0.8,
        help="accuracy that dense training must reach in part 2; default: %(default)s",
    )
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time steps, then train. **Ranks:** all."""
    threads(1)
    chosen.node_size = 1
    ranks.join(chosen)
    if chosen.part != 2:
        own = {"mean, ms": lambda one: f"{one['mean_seconds'] * 1e3:.2f}"}
        title = f"{chosen.entries:,} weights, rank 2 slowed {chosen.slowed:g} times"
        yield options.Table(title, list(speed_rows(chosen)), own=own)
    own = {
        "accuracy": lambda one: f"{one['accuracy']:.4f}",
        "MB": lambda one: f"{one['bytes'] / 1e6:.1f}",
        "rate": lambda one: f"{one['rate']:g}",
    }
    for samples in [] if chosen.part == 1 else chosen.sizes:
        yield options.Table("accuracy over bytes", accuracy_rows(samples, chosen), own=own)
