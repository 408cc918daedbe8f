"""Claim: the replica guard costs less than 0.5 % of a step, at its default of a check in 100 steps.

    python scripts/bench guard
    python scripts/bench guard -n 2000000 --json guard.jsonl

Peer: the same step without a guard. A step is the exchange and the update of the variables of a
ResNet-50, scaled to n entries in all, without forward and backward pass: the share of a whole step
is less. Steps without a guard, steps between two checks and steps with a check take turns; the
slowest rank counts. `share` is of 100 steps, one of them with a check: the median, over the rounds,
of what a step takes more than the one without a guard, over the median of those. Verified: a
replica that is changed on one rank is found, and the share of what checks cost is within the limit.
(What a step between two checks costs is less than its median varies, so it is shown but not
judged.)
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from bench import options, ranks, rounds
from bench.benchmarks.step import gradient_sizes
from bench.peers import bare_step

import tfcommx as cx

EVERY = 100  # steps between two checks, the default
LIMIT = 0.005
# Steps between two checks -> what is measured
KINDS = {"no guard": None, "between checks": 10**9, "with a check": 1}


def make_step(every: int | None, entries: int) -> tuple[Callable[[], float], list]:
    """Return a step of exchange and update, and its variables."""
    sizes = gradient_sizes(entries)
    weights = [keras.Variable(tf.ones([n]), name=f"w{i}") for i, n in enumerate(sizes)]
    optimizer = cx.DistributedOptimizer(
        keras.optimizers.SGD(0.01), cx.Scheme(), check_replicas_every=every
    )
    return bare_step(optimizer, weights, [tf.ones_like(weight) for weight in weights]), weights


def finds_a_difference(step: Callable[[], float], weights: list) -> bool:
    """Change one entry on rank 1; tell whether the next check refuses it."""
    if cx.rank() == 1:
        weights[0].assign(tf.tensor_scatter_nd_add(weights[0], [[0]], [1e-6]))
    try:
        step()
    except tf.errors.OpError as error:
        return "Replicas differ" in str(error)
    return False


def parser() -> argparse.ArgumentParser:
    return options.parser(__doc__, sizes=[25_600_000], repeats=41)


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time all kinds of steps on variables of so many entries in all. **Ranks:** all."""
    comm = ranks.join(chosen)
    for entries in chosen.sizes:
        made = {name: make_step(every, entries) for name, every in KINDS.items()}
        steps = {name: step for name, (step, _) in made.items()}
        seconds = rounds.take_turns(steps, chosen.repeats, comm)
        plain = seconds["no guard"]
        shares = {
            name: statistics.median(a - b for a, b in zip(times, plain, strict=True))
            / statistics.median(plain)
            for name, times in seconds.items()
        }
        shares["with a check"] /= EVERY
        found = finds_a_difference(*made["with a check"])
        cheap = chosen.smoke or shares["with a check"] < LIMIT
        right = {name: name != "with a check" or (found and cheap) for name in KINDS}
        rows = options.rows_of(entries, seconds, right)
        rows = [row | {"share": shares[row["name"]]} for row in rows]
        title = (
            f"{entries:,} entries, {comm.topology.size} ranks; a check in {EVERY} steps, limit "
            f"{100 * LIMIT} %"
        )
        own = {"share of a step": lambda row: f"{100 * row['share']:.3f} %"}
        yield options.Table(title, rows, "no guard", own)
