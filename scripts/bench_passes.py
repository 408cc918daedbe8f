#!/usr/bin/env python3
"""Claim: of a step's passes over a sparse bucket, the selection and the merge cost most.

    python scripts/bench_passes.py                       # 8 M entries, as 4 ranks exchange them
    python scripts/bench_passes.py -n 2000000 --density 0.001 --json passes.jsonl

Each part of the exchange, without its messages, on one rank and one thread; the parts take turns,
round by round, and the median counts. "(before)" is what the part did until 2026-11-22. Both ways
of a part are verified against each other, to the bit. Columns of its own: `ratio`, the median over
the rounds of the time over that of flattening in the same round.
Options and columns: scripts/benchmark_options.py.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import benchmark_options
import numpy as np
import tensorflow as tf

from tfcommx.kernels import select
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.flat import flatten, unflatten
from tfcommx.runtime.selector import keep_rounding_error
from tfcommx.terms import Scheme, Sparse, Topology
from tfcommx.wire import codec

WIRE, RANKS, VARIABLES = "block16/float16", 4, 32
Part = Callable[[], Any]


def parts_of(n: int, density: float) -> tuple[dict[str, Part], dict[str, tuple[Part, Part]]]:
    """Return name -> part of the exchange, and the pairs whose results must have equal bits."""
    gradients = [Gradient(f"w{i}", (n // VARIABLES, 1), "float32") for i in range(VARIABLES)]
    scheme = Scheme("allgather", "mstopk", density, wire=WIRE, merging="single")
    (bucket,) = make_plan(gradients, {"*": scheme}, Topology(RANKS, 1)).buckets
    numbers = np.random.default_rng(1)
    parts = [
        tf.constant(numbers.standard_normal(one.shape, np.float32)) for one in reversed(gradients)
    ]
    size, k = bucket.padded, bucket.selected
    residual, old, new = (tf.Variable(tf.zeros([size])) for _ in range(3))
    flat = flatten(parts, bucket)
    chosen = select.select(flat, k, 1, bucket.selection)
    sparse, error = codec.rounded(chosen, WIRE)
    words = codec.encode(sparse, WIRE)
    gathered = tf.concat([words] * RANKS, axis=0)
    merged = codec.merge(gathered, k, size, WIRE)
    factor = tf.constant(1 / RANKS)

    def rounded() -> tuple[tf.Tensor, tf.Tensor]:
        kept, lost = codec.rounded(chosen, WIRE)
        return kept.values, lost

    def scattered() -> tf.Tensor:
        old.scatter_add(tf.IndexedSlices(error, chosen.indices))
        return chosen.indices

    def written() -> tf.Tensor:
        keep_rounding_error(new, chosen, error)
        return chosen.indices

    found: dict[str, Part] = {
        "flatten": lambda: flatten(parts, bucket),
        "select": lambda: select.select_with_residual(flat, residual, k, 1, bucket.selection)[:2],
        "round": rounded,
        "rounding error (before)": scattered,
        "rounding error": written,
        "encode": lambda: codec.encode(Sparse(sparse.indices, sparse.values, size), WIRE),
        "merge": lambda: codec.merge(gathered, k, size, WIRE),
        "merge and average": lambda: codec.merge(gathered, k, size, WIRE, factor=1 / RANKS),
        "average (before)": lambda: merged * factor,
        "unflatten (before)": lambda: tf.split(merged, [*bucket.sizes]),
        "unflatten": lambda: unflatten(merged, parts, bucket),
    }
    scattered(), written()
    pairs = {
        "rounding error": (lambda: old, lambda: new),
        "merge and average": (lambda: merged * factor, found["merge and average"]),
        "unflatten": (
            lambda: merged,
            lambda: tf.concat([tf.reshape(one, [-1]) for one in found["unflatten"]()], 0),
        ),
    }
    return found, pairs


def measure(n: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """Time all parts on a vector of n entries; return a row for each."""
    found, pairs = parts_of(n, density)
    same = {
        name: before().numpy().tobytes() == now().numpy().tobytes()
        for name, (before, now) in pairs.items()
    }
    steps = {name: tf.function(part, autograph=False) for name, part in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            taken = time.perf_counter() - start
            if number >= 2:  # The first ones trace, and touch memory
                seconds[name].append(taken)
    base = seconds["flatten"]
    return [
        benchmark_options.row(
            name,
            n,
            statistics.median(times),
            same.get(name, True),
            density,
            ratio=statistics.median(a / b for a, b in zip(times, base, strict=True)),
        )
        for name, times in seconds.items()
    ]


def main() -> int:
    options = benchmark_options.parser(__doc__, sizes=[8_000_000], repeats=15)
    options.add_argument("--density", type=float, default=0.01, help="default: %(default)s")
    chosen = options.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rows = []
    for n in chosen.sizes:
        found = measure(n // (16 * VARIABLES) * 16 * VARIABLES, chosen.density, chosen.repeats)
        rows += found
        own = {"ratio": lambda one: f"{one['ratio']:.2f}"}
        benchmark_options.print_table(found, f"{n:,} entries, {WIRE}, {RANKS} ranks", own=own)
    return benchmark_options.finish(rows, chosen)


if __name__ == "__main__":
    raise SystemExit(main())
