"""Claim: of a step's passes over a sparse bucket, the selection and the merge cost most.

    python scripts/bench passes                          # 8 M entries, as 4 ranks exchange them
    python scripts/bench passes -n 2000000 --density 0.001 --json passes.jsonl
    python scripts/bench passes -n 25000000 --wire elias/int8

Peers: the parts are each other's. Each part of the exchange, without its messages, on one rank and
one thread; they take turns. What is merged comes from four ranks with
gradients of their own. One variable in the middle has one entry more than the others: so half of
the variables begin where 64 bytes do, and the others do not. "(before)" is what the part did until
2026-11-22. All parts are verified before they are timed, by NumPy or by what undoes them, to the
bit; sent plus kept is the gradient, and nearly all that is large was sent. Columns of its own:
`ratio`, the median over the rounds of the time over that of flattening in the same round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from bench import options, rounds
from bench.checks import selected_right
from bench.peers import threads

from tfcommx import core
from tfcommx.core import SPARSE_WIRES, Scheme, Sparse, Topology
from tfcommx.core.wire_formats import CODE_BITS, SPARSE_FORMATS
from tfcommx.kernels import select
from tfcommx.kernels.sparse import keep
from tfcommx.kernels.wire import decode
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.bucket_runner import flatten, unflatten
from tfcommx.wire import codec

RANKS, VARIABLES = 4, 32
Part = Callable[[], Any]


class Bucket(NamedTuple):
    """A bucket of one rank, and what all ranks have selected from theirs."""

    # The variables' gradients, as they lie in the bucket
    parts: list[tf.Tensor]
    plan: core.Bucket
    # The same as one vector
    flat: tf.Tensor
    # What this rank's rule chose, before rounding
    chosen: Sparse
    # Of each rank, this one first: what it chose, rounded as it travels
    sent: list[Sparse]
    # The ranks' buffers, one after another
    gathered: tf.Tensor
    # Their sum
    merged: tf.Tensor
    # Of the selection, and of both ways to keep the rounding error
    residual: tf.Variable
    old: tf.Variable
    new: tf.Variable


def is_writable(sparse: Sparse, wire: str) -> bool:
    """Tell whether values are as the format writes them."""
    dtype = SPARSE_FORMATS[wire].values
    if dtype in CODE_BITS:
        return not codec.rounded(sparse, wire)[1].numpy().any()
    written = tf.cast(tf.cast(sparse.values, dtype), tf.float32)
    return np.array_equal(written, sparse.values)


def bucket_of(n: int, density: float, wire: str) -> Bucket:
    """Make a bucket of n entries, a multiple of 32, at least 64."""
    sizes = [n // VARIABLES] * VARIABLES
    sizes[VARIABLES // 2] += 1
    sizes[0] -= 1
    gradients = [Gradient(f"w{i}", (size, 1), "float32") for i, size in enumerate(sizes)]
    scheme = Scheme("allgather", "mstopk", density, wire=wire, merging="single")
    (plan,) = make_plan(gradients, {"*": scheme}, Topology(RANKS, 1)).buckets
    numbers = np.random.default_rng(1)
    parts = [
        tf.constant(numbers.standard_normal(one.shape, np.float32)) for one in reversed(gradients)
    ]
    flat = flatten(parts, plan)
    size, k = plan.padded, plan.selected
    chosen = [select.select(flat, k, 1, plan.selection)]
    for rank in range(1, RANKS):  # Other entries, most of them at other places
        other = tf.constant(numbers.standard_normal(size, np.float32))
        chosen.append(select.select(other, k, 1 + rank, plan.selection))
    sent = [Sparse(*codec.rounded(one, wire)[0][:2], size) for one in chosen]
    gathered = tf.concat([codec.encode(one, wire) for one in sent], axis=0)
    merged = codec.merge(gathered, k, size, wire)
    kept = [tf.Variable(tf.zeros([size])) for _ in range(3)]
    return Bucket(parts, plan, flat, chosen[0], sent, gathered, merged, *kept)


def parts_of(bucket: Bucket) -> dict[str, Part]:
    """Return name -> part of the exchange."""
    parts, plan, flat, chosen, sent, gathered, merged, residual, old, new = bucket
    size, k, rule, wire = plan.padded, plan.selected, plan.selection, plan.wire
    error = codec.rounded(chosen, wire)[1]
    factor = tf.constant(1 / RANKS)

    def rounded() -> tuple[tf.Tensor, tf.Tensor]:
        kept, lost = codec.rounded(chosen, wire)
        return kept.values, lost

    # Results that wait for what is written; old[:1] would copy all of it
    def scattered() -> tf.Tensor:
        old.scatter_add(tf.IndexedSlices(error, chosen.indices))
        return old.sparse_read([0])

    def written() -> tf.Tensor:
        keep(new, chosen, error)
        return new.sparse_read([0])

    return {
        "flatten": lambda: flatten(parts, plan),
        "select": lambda: select.select_with_residual(flat, residual, k, 1, rule)[:2],
        "round": rounded,
        "rounding error (before)": scattered,
        "rounding error": written,
        "encode": lambda: codec.encode(sent[0], wire),
        "merge": lambda: codec.merge(gathered, k, size, wire),
        "merge and average": lambda: codec.merge(gathered, k, size, wire, factor=1 / RANKS),
        "average (before)": lambda: merged * factor,
        "unflatten (before)": lambda: tf.split(merged, [*plan.sizes]),
        "unflatten": lambda: unflatten(merged, parts, plan),
    }


def verified(bucket: Bucket, found: dict[str, Part]) -> dict[str, bool]:
    """Carry each part out once, the first time, and check its result, to the bit."""
    done = {name: part() for name, part in found.items()}
    flat, size, k = bucket.flat.numpy(), bucket.plan.padded, bucket.plan.selected
    wire = bucket.plan.wire
    sent = [(one.indices.numpy(), one.values.numpy()) for one in bucket.sent]
    total = np.zeros(size, np.float32)
    for indices, values in sent:  # Unique in each
        total[indices] += values
    kept, lost = (one.numpy() for one in done["round"])
    error = np.zeros(size, np.float32)
    error[bucket.chosen.indices.numpy()] = lost
    chosen = [one.numpy() for one in done["select"]]

    def joined(parts: list[tf.Tensor]) -> np.ndarray:
        return np.concatenate([one.numpy().ravel() for one in parts])

    return {
        "flatten": np.array_equal(done["flatten"], joined(bucket.parts)),
        "select": selected_right(*chosen, bucket.residual.numpy(), flat, k),
        "round": np.array_equal(kept + lost, bucket.chosen.values)
        and is_writable(Sparse(bucket.chosen.indices, done["round"][0], size), wire),
        "rounding error (before)": np.array_equal(bucket.old.numpy(), error),
        "rounding error": np.array_equal(bucket.new.numpy(), error),
        "encode": all(
            np.array_equal(read, given)
            for read, given in zip(decode(done["encode"], k, size, wire), sent[0], strict=True)
        ),
        "merge": np.array_equal(done["merge"], total),
        "merge and average": np.array_equal(done["merge and average"], total / RANKS),
        "average (before)": np.array_equal(done["average (before)"], total / RANKS),
        "unflatten (before)": np.array_equal(joined(done["unflatten (before)"]), total),
        "unflatten": np.array_equal(joined(done["unflatten"]), total),
    }


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, sizes=[8_000_000], repeats=15)
    found.add_argument("--density", type=float, default=0.01, help="default: %(default)s")
    rounding = [one for one in SPARSE_WIRES if SPARSE_FORMATS[one].values != "float32"]
    found.add_argument(
        "--wire", choices=rounding, default="block16/float16", help="default: %(default)s"
    )
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time all parts on a vector of n entries."""
    threads(1, 1)
    for size in chosen.sizes:
        n = size // (16 * VARIABLES) * 16 * VARIABLES
        bucket = bucket_of(n, chosen.density, chosen.wire)
        found = parts_of(bucket)
        right = verified(bucket, found)
        steps = {name: tf.function(part, autograph=False) for name, part in found.items()}
        seconds = rounds.take_turns(steps, chosen.repeats)
        rows = options.rows_of(n, seconds, right, "flatten", density=chosen.density)
        yield options.Table(f"{n:,} entries, {chosen.wire}, {RANKS} ranks", rows)
