"""Claim: selection with error feedback costs at most 1.5 times the residual's bare addition.

It also costs at most a tenth of a top-k.

    python scripts/bench select        # n = 25,000,000, densities 0.001 and 0.01, all cores
    python scripts/bench select --dtypes float32 float16 bfloat16
    python scripts/bench select --inputs equal zero one_bin sorted
                                       # degenerate gradients: only the kernels and the addition

Peers: the top-k of TensorFlow, NumPy and PyTorch, and Algorithm 1 as printed. Each adds the
gradient to its own residual (except algorithm1, which is timed on the sum), chooses k entries
by magnitude and zeroes them in the residual. They take turns; the slow ones take part in fewer
rounds. `limit_seconds` is 1.5 times the bare addition r += g of the same rounds on the same
threads. Each result is verified."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from bench import options, rounds
from bench.checks import selected_right

from tfcommx import selection
from tfcommx.core import Sparse
from tfcommx.kernels import loader
from tfcommx.kernels.select import below

ALLOWED = 1.5  # times the bare addition
# Contestants that may choose other entries than the k largest
APPROXIMATE = ("mstopk", "dgc", "algorithm1")
DTYPES = {"float32": tf.float32, "float16": tf.float16, "bfloat16": tf.bfloat16}
# Gradient [n] of a generator; all except the first begin with a residual of zeros.
INPUTS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda random, n: random.standard_normal(n, np.float32),
    "equal": lambda random, n: np.full(n, -1.5, np.float32),
    "zero": lambda random, n: np.zeros(n, np.float32),
    # One exponent, 12 equal bits.
    "one_bin": lambda random, n: (1 + random.integers(64, size=n) * 2.0**-23).astype(np.float32),
    "sorted": lambda random, n: np.sort(random.standard_normal(n, np.float32)),
}


class Contestant(NamedTuple):
    name: str
    # Seed -> the chosen entries
    run: Callable[[int], Sparse | None]
    # None: chooses from the sum of the first round, keeps nothing
    residual: np.ndarray | tf.Variable | None
    # The slow ones take part in fewer
    rounds: int


def compiled(
    rule: str, gradient: tf.Tensor, residual: tf.Variable, k: int
) -> Callable[[int], Sparse]:
    select = selection.rule(rule).select_with_residual
    function = tf.function(lambda seed: select(gradient, residual, k, seed))
    return lambda seed: function(tf.constant(seed, tf.int64))


def addition(gradient: tf.Tensor, start: np.ndarray, rounds: int) -> Contestant:
    """Make the bare addition of the gradient to a residual."""
    bare, wide = tf.Variable(start), tf.cast(gradient, tf.float32)

    @tf.function
    def add() -> None:
        bare.assign_add(wide, read_value=False)

    return Contestant("residual_add", lambda seed: add(), bare, rounds)


def printed_algorithm1(gradient: tf.Tensor, start: np.ndarray, k: int, rounds: int) -> Contestant:
    summed = tf.constant(start) + tf.cast(gradient, tf.float32)
    printed = tf.function(lambda seed: algorithm1(summed, k, seed=seed))
    return Contestant("algorithm1", lambda seed: printed(tf.constant(seed, tf.int64)), None, rounds)


def tf_top_k(gradient: tf.Tensor, start: np.ndarray, k: int, rounds: int) -> Contestant:
    residual = tf.Variable(start)

    @tf.function
    def add_and_top_k() -> Sparse:
        acc = residual.assign_add(tf.cast(gradient, tf.float32)).read_value()
        indices = tf.math.top_k(tf.abs(acc), k, sorted=False).indices
        chosen = Sparse(indices, tf.gather(acc, indices), acc.shape[0])
        residual.scatter_update(tf.IndexedSlices(tf.zeros([k]), chosen.indices))
        return chosen

    return Contestant("tf_top_k", lambda seed: add_and_top_k(), residual, rounds)


def numpy_argpartition(added: np.ndarray, start: np.ndarray, k: int, rounds: int) -> Contestant:
    residual = start.copy()

    def argpartition(seed: int) -> Sparse:
        np.add(residual, added, out=residual)
        indices = np.argpartition(np.abs(residual), residual.size - k)[residual.size - k :]
        values = residual[indices]
        residual[indices] = 0
        return Sparse(indices, values, residual.size)

    return Contestant("numpy_argpartition", argpartition, residual, rounds)


def torch_topk(added: np.ndarray, start: np.ndarray, k: int, rounds: int) -> Contestant:
    """Make PyTorch's contestant. **Raises:** ImportError if it is not installed."""
    import torch

    residual = start.copy()
    kept, new = torch.from_numpy(residual), torch.from_numpy(added)

    def topk(seed: int) -> Sparse:
        kept.add_(new)
        indices = torch.topk(kept.abs(), k, sorted=False).indices
        values = kept[indices]
        kept[indices] = 0
        return Sparse(indices.numpy(), values.numpy(), residual.size)

    return Contestant("torch_topk", topk, residual, rounds)


def contestants(
    gradient: tf.Tensor, start: np.ndarray, k: int, rounds: int, opponents: bool
) -> list[Contestant]:
    """Make the contestants, each with its own residual, initialized to `start`.

    Without opponents: the kernels and the addition.
    """
    few = max(2, rounds // 4)
    found = [addition(gradient, start, rounds)]
    for rule in ("mstopk", "exact", "dgc") if opponents else ("mstopk", "exact"):
        residual = tf.Variable(start)
        choose = compiled(rule, gradient, residual, k)
        found.append(Contestant(rule, choose, residual, few if rule == "dgc" else rounds))
    if not opponents:
        return found
    added = tf.cast(gradient, tf.float32).numpy()
    found += [
        printed_algorithm1(gradient, start, k, few),
        tf_top_k(gradient, start, k, few),
        numpy_argpartition(added, start, k, few),
    ]
    with contextlib.suppress(ImportError):  # the table says so
        found.append(torch_topk(added, start, k, few))
    return found


def algorithm1(x: tf.Tensor, k: int, searches: int = 30, seed: int = 0) -> Sparse:
    """Choose k entries by Algorithm 1 as printed: a pass over |x| for each threshold tried.

    If no threshold with at most k entries is found, the upper one is infinite here (printed: 0,
    which takes everything). In float32, the fastest form; the rule `binary_search` is the same in
    float64, in which no mean overflows.

    **Cost:** searches + 5 passes.
    **Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters, 2021, Algorithm 1.
    """
    a = tf.abs(tf.convert_to_tensor(x))
    mean, largest = tf.reduce_mean(a), tf.reduce_max(a)
    left, right = tf.constant(0.0), tf.constant(1.0)
    k1, k2 = tf.constant(0), tf.size(a)
    upper, lower = tf.constant(float("inf")), tf.constant(0.0)
    for _ in range(searches):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (largest - mean)
        reached = tf.math.count_nonzero(a >= threshold, dtype=tf.int32)
        few = reached <= k
        left, right = tf.where(few, left, ratio), tf.where(few, ratio, right)
        better1, better2 = few & (reached > k1), ~few & (reached < k2)
        k1, upper = tf.where(better1, reached, k1), tf.where(better1, threshold, upper)
        k2, lower = tf.where(better2, reached, k2), tf.where(better2, threshold, lower)
    above = tf.cast(tf.where(a >= upper)[:, 0], tf.int32)
    inside = tf.cast(tf.where((a < upper) & (a >= lower))[:, 0], tf.int32)
    need = k - tf.size(above)
    offset = below(seed, tf.size(inside) - need + 1)
    indices = tf.concat([above, inside[offset : offset + need]], 0)
    return Sparse(indices, tf.gather(x, indices), int(a.shape[0]))


def array(x: object) -> np.ndarray:
    return x.numpy() if hasattr(x, "numpy") else np.asarray(x)


def checked(contestant: Contestant, chosen: Sparse | None, total: np.ndarray, k: int) -> bool:
    """Check a contestant's first round."""
    kept = None if contestant.residual is None else array(contestant.residual)
    if chosen is None:
        return np.array_equal(kept, total)
    share = 0.99 if contestant.name in APPROXIMATE else 1.0
    return selected_right(array(chosen.indices), array(chosen.values), kept, total, k, share)


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, sizes=[25_000_000], repeats=21)
    found.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01], help="k / n")
    found.add_argument(
        "--inputs", nargs="+", choices=list(INPUTS), default=["normal"], help="kinds of gradients"
    )
    found.add_argument(
        "--dtypes", nargs="+", choices=sorted(DTYPES), default=["float32"], help="of the gradient"
    )
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time all contestants on each setting."""
    if loader.library() is None:
        raise SystemExit(f"The native library is needed. {loader.REBUILD}")
    settings = itertools.product(chosen.inputs, chosen.sizes, chosen.density, chosen.dtypes)
    with tf.device("/cpu:0"):
        for kind, n, density, dtype in settings:
            yield race(kind, n, density, dtype, chosen.repeats)


def race(kind: str, n: int, density: float, dtype: str, repeats: int) -> options.Table:
    """Time all contestants on one setting."""
    random = np.random.default_rng(1)
    k = max(1, int(n * density))
    gradient = tf.cast(INPUTS[kind](random, n), DTYPES[dtype])
    added = tf.cast(gradient, tf.float32).numpy()
    start = random.standard_normal(n, np.float32) * (kind == "normal")
    field = contestants(gradient, start, k, repeats, opponents=kind == "normal")
    # The first round also traces and warms up.
    checks = {c.name: checked(c, c.run(0), start + added, k) for c in field}
    times: dict[str, list[float]] = {c.name: [] for c in field}
    for turn in range(repeats):
        for one in rounds.turns([c for c in field if turn < c.rounds], turn):
            times[one.name].append(rounds.seconds_of(lambda one=one, turn=turn: one.run(turn + 1)))
    limit = ALLOWED * statistics.median(times["residual_add"])
    threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
    about = {"device": "cpu", "input": kind, "dtype": dtype, "k": k, "threads": threads}
    rows = [
        options.row(name, n, seconds, checks[name], density, limit, **about)
        for name, seconds in times.items()
    ]
    title = f"{kind}, {dtype}, n = {n:,}, k = {k:,}, {threads} threads"
    missing = "tf_top_k" in times and "torch_topk" not in times
    return options.Table(title, rows, "residual_add", notes=["torch_topk: not installed"] * missing)
