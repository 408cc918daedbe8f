#!/usr/bin/env python3
"""Claim: with elastic averaging a slow rank slows nobody, and the centre is as good as dense sync.

    horovodrun -np 3 --mpi --mpi-args=--enable-recovery \\
        --binding-args="--bind-to none --map-by slot" \\
        python scripts/bench_elastic_averaging.py --json elastic.jsonl --png elastic.png

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

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import tfcommx.cli.quiet_start

# isort: split
import benchmark_options
import benchmark_times
import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx
from tfcommx.optim.centre import with_centre
from tfcommx.recipes.datasets.fashion_mnist_files import fetch, load
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
        self.optimizer.build([weight])
        self.alone = isinstance(strategy, ElasticAveraging)

        # An argument, because TensorFlow computes the exchange of constants once for all steps; a
        # result, because a step without one returns before it is done
        @tf.function
        def step(gradient: tf.Tensor) -> tf.Tensor:
            self.optimizer.apply([gradient], [weight])
            return weight[0]

        self.step, self.gradient = step, tf.fill([entries], 1e-3 * cx.rank())
        self.step(self.gradient)

    def seconds(self, slowed: float, lasts: float) -> list[float]:
        """Take steps for so many seconds; return ranks 0 and 1's, as means of EVERY steps."""
        mine = STEP_SECONDS * (slowed if cx.rank() == 2 else 1)
        # Equally many steps on all ranks, as long as the slowest takes, if they wait for each other
        limit = 10**9 if self.alone else int(lasts / STEP_SECONDS / slowed)
        cx.comm.current().gather_objects("all begin")
        end, taken = time.monotonic() + lasts, []
        while (self.alone and time.monotonic() < end) or (not self.alone and len(taken) < limit):
            start = time.perf_counter()
            time.sleep(mine)
            self.step(self.gradient).numpy()
            taken.append(time.perf_counter() - start)
        cx.take_centre(keras.Sequential(), self.optimizer)
        first, second, *_ = cx.comm.current().gather_objects(taken)
        return [one for rank in (first, second) for one in benchmark_times.of_windows(rank, EVERY)]


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


def accuracy_rows(
    samples: int, epochs: int, rate: float, seeds: int, floor: float
) -> list[dict[str, Any]]:
    """Train in all ways, with each seed; return a row of each way. **Ranks:** all."""
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
            runs = [train(data, epochs, strategy, scheme, one, seed) for seed in range(seeds)]
            curves, seconds = zip(*cx.comm.current().gather_objects(runs)[0], strict=True)
            own = [accuracy_of(curve) for curve in curves]
            tried.append((statistics.fmean(own), own, curves[0], statistics.fmean(seconds), one))
        accuracy, own, curve, seconds, best = max(tried)
        dense = accuracy if dense is None else dense
        sent = curve[-1][0]
        rows.append(
            benchmark_options.row(
                name,
                samples,
                seconds,
                is_as_good(accuracy, dense, floor) if scheme == DENSE else None,
                density=scheme.density,
                accuracy=accuracy,
                accuracies=own,
                bytes=sent,
                rate=best,
                epochs=epochs,
                curve=curve,
            )
        )
        if cx.is_chief():
            print(
                f"{name}: accuracy {accuracy:.4f} ({min(own):.4f} to {max(own):.4f}), "
                f"{sent / 1e6:.1f} MB, rate {best}, {seconds:.0f} s a run",
                flush=True,
            )
    return rows


def speed_rows(entries: int, slowed: float, lasts: float) -> list[dict[str, Any]]:
    """Time steps with ranks alike and with a slow one. **Ranks:** all."""
    rows = []
    for name, strategy in (("elastic", ElasticAveraging(every=EVERY)), ("sync", Synchronous())):
        steps, alike, slow = Steps(entries, strategy), [], []
        for _ in range(ROUNDS):
            alike += steps.seconds(1.0, lasts)
            slow += steps.seconds(slowed, lasts)
        usual, late = float(np.median(alike)), float(np.median(slow))
        limit = MAX_SLOWER * usual if name == "elastic" else None
        rows += [
            speed_row(f"{name}, ranks alike", entries, alike, None),
            speed_row(f"{name}, rank 2 slow", entries, slow, limit),
        ]
        if cx.is_chief():
            print(
                f"{name}: {1000 * usual:.2f} ms a step, {1000 * late:.2f} with a slow rank "
                f"({late / usual:.3f}); means {np.mean(alike):.4f}, {np.mean(slow):.4f} s",
                flush=True,
            )
    return rows


def speed_row(name: str, entries: int, seconds: list[float], limit: float | None) -> dict[str, Any]:
    """Return a row; it is judged if there is a limit."""
    median = float(np.median(seconds))
    return benchmark_options.row(
        name,
        entries,
        median,
        None if limit is None else median < limit,
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
    figure.savefig(path, dpi=120)


def main() -> int:
    options = benchmark_options.parser(
        __doc__, [60_000], 2, "training samples in all", "epochs of training"
    )
    options.add_argument(
        "--part", type=int, choices=(1, 2), help="measure this part alone; default: both"
    )
    options.add_argument("--entries", type=int, default=1_000_000, help="weights in part 1")
    options.add_argument("--slowed", type=float, default=3.0, help="times that rank 2 is slowed")
    options.add_argument("--lasts", type=float, default=10.0, help="seconds of a round in part 1")
    options.add_argument("--rate", type=float, default=0.05, help="learning rate of one rank")
    options.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="runs of each way in part 2, seven for each seed; default: %(default)s",
    )
    options.add_argument(
        "--floor",
        type=float,
        default=0.8,
        help="accuracy that dense training must reach in part 2; default: %(default)s",
    )
    chosen = options.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    cx.init(node_size=1)
    rows = [] if chosen.part == 2 else speed_rows(chosen.entries, chosen.slowed, chosen.lasts)
    for samples in [] if chosen.part == 1 else chosen.sizes:
        rows += accuracy_rows(samples, chosen.repeats, chosen.rate, chosen.seeds, chosen.floor)
    if not cx.is_chief():
        return 0
    if chosen.png:
        draw(rows, chosen.png)
    chosen.png = None
    return benchmark_options.finish(rows, chosen)


if __name__ == "__main__":
    sys.exit(main())
