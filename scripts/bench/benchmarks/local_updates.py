"""Claim: weight averaging in rounds that overlap steps takes about as long as no exchange.

    python scripts/bench local_updates --nodes 4 --slots 1 --rates 200mbit --json local.jsonl
    python scripts/bench local_updates --rates none --models convolutional   # on this host, no root

Peer: no exchange at all. A model is trained with DiLoCo's outer optimizer, everything dense in 32
bits. A way is F/D: all variables are averaged once in `--every` steps, in F fragments, and the
average of a round arrives D steps later; D = 0: the step that sends waits.

The ways take turns. A turn is one window of `--every` steps that is not timed, and one that is:
rounds are under way when it begins, as in a training. `seconds` is the mean step of a window on the
slowest rank, the median over the turns; `longest_step` the longest step, likewise. `ratio` is the
median, over the turns, of the time over that without an exchange. `bytes_between` counts the bytes
that a rank sends to other nodes in a step. `verified`: the ranks' weights are equal at the end of
each turn, and the bytes counted are those that the routes promise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from bench import options, ranks, rounds
from bench.benchmarks import training_models
from bench.benchmarks.training_contestants import ALONE
from bench.checks import weighted_sum
from bench.peers import plain_optimizer

import tfcommx as cx
from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.planner.plan import fragments_of_buckets
from tfcommx.strategies import WeightAveraging


class Window(NamedTuple):
    """The timed steps of a turn, on the slowest rank."""

    mean_s: float
    longest_s: float
    # True if the ranks' weights are equal and the bytes sent are those that the plan promises
    right: bool


class Way:
    """A model, and how its weights are averaged; without a strategy not at all."""

    def __init__(self, comm: Comm, chosen: argparse.Namespace, model: str, words: str) -> None:
        self.name, self.windows = words, list[Window]()
        self._comm, self._every, self._strategy = comm, chosen.every, None
        optimizer = plain_optimizer(keras.optimizers.SGD(0.01), None)
        if words != ALONE:
            fragments, overlap = map(int, words.split("/"))
            outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
            self._strategy = WeightAveraging(
                chosen.every, outer=outer, fragments=fragments, overlap=overlap
            )
            optimizer = cx.DistributedOptimizer(
                keras.optimizers.SGD(0.01), strategy=self._strategy, check_replicas_every=None
            )
        self.model, self.batch = training_models.make(model, optimizer, chosen.batch, comm.rank)

    def take_turn(self) -> None:
        """Take two windows of steps, of which the second is timed. **Ranks:** all."""
        before = self._comm.traffic().between
        for _ in range(self._every):
            self.model.train_on_batch(*self.batch)
        # No collective here, because it would wait for the pending round
        ends = [time.perf_counter()]
        for _ in range(self._every):
            self.model.train_on_batch(*self.batch)
            ends.append(time.perf_counter())
        everyone = self._comm.gather_objects(np.diff(ends))
        mean_s = max(float(one.mean()) for one in everyone)
        longest_s = max(float(one.max()) for one in everyone)
        right = self._is_right(before)
        self.windows.append(Window(mean_s, longest_s, right))

    def bytes_of_fragments(self) -> list[float]:
        """Return the bytes that a rank sends to other nodes in one round of each fragment."""
        if self._strategy is None:
            return [0.0]
        (run,) = self.model.optimizer.exchanger.runs.values()
        plan = run.executor.plan
        return [
            sum(routes.of(one).wire_bytes(one, plan.topology).between for one in part.buckets)
            for part in fragments_of_buckets(plan, self._strategy.fragments)
        ]

    def _is_right(self, before: float) -> bool:
        """End the pending round; return True if weights and bytes are right."""
        if self._strategy is None:
            return True
        cx.consolidate(self.model.optimizer)
        sums = [weighted_sum(one.numpy().ravel()) for one in self.model.trainable_variables]
        everyone = self._comm.gather_objects((sums, self._comm.traffic().between - before))
        equal = all(other == sums for other, _ in everyone) and bool(np.isfinite(sums).all())
        # Of the last window's rounds all but the last one's fragment were averaged once more
        parts = self.bytes_of_fragments()
        promised = 2 * sum(parts) + sum(parts[:-1])
        return equal and abs(statistics.fmean(sent for _, sent in everyone) / promised - 1) < 1e-6


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, sizes=[], repeats=3, meaning_of_repeats="turns")
    models = ("convolutional", "transformer", "embedding", "resnet50")
    found.add_argument("--models", nargs="+", choices=models, default=["resnet50"])
    found.add_argument("--every", type=int, default=32, help="steps of a window, and of a round")
    found.add_argument("--batch", type=int, default=4, help="samples of a rank")
    found.add_argument(
        "--ways",
        nargs="+",
        default=["1/0", "1/32", "4/0", "4/8"],
        metavar="F/D",
        help="fragments and overlap; default: %(default)s",
    )
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Let all ways take turns. **Ranks:** all."""
    comm = ranks.join(chosen)
    for model in chosen.models:
        ways = [Way(comm, chosen, model, words) for words in (ALONE, *chosen.ways)]
        for number in range(-1, chosen.repeats):
            for way in rounds.turns(ways, number):
                way.take_turn()
        for way in ways:
            del way.windows[0]  # Its steps were traced
        yield table(model, comm, ways, chosen)


def table(model: str, comm: Comm, ways: Sequence[Way], chosen: argparse.Namespace) -> options.Table:
    """Make the table of one model."""
    alone = [one.mean_s for one in ways[0].windows]
    rows: list[dict[str, Any]] = []
    for way in ways:
        seconds = [one.mean_s for one in way.windows]
        rows.append(
            options.row(
                way.name,
                way.model.count_params(),
                seconds,
                all(one.right for one in way.windows),
                model=model,
                every=chosen.every,
                nodes=comm.topology.nodes,
                slots=comm.topology.slots,
                rate_mbit=chosen.rate_mbit,
                longest_step=statistics.median(one.longest_s for one in way.windows),
                bytes_between=sum(way.bytes_of_fragments()) / chosen.every,
                ratio=rounds.paired_ratio(seconds, alone),
            )
        )
    own = {
        "longest, ms": lambda one: f"{one['longest_step'] * 1e3:.0f}",
        "MB between": lambda one: f"{one['bytes_between'] / 1e6:.2f}",
    }
    rate = "this host" if chosen.rate_mbit is None else f"{chosen.rate_mbit:g} Mbit/s"
    title = f"{model}, {comm.topology.nodes} nodes of {comm.topology.slots} slots, {rate}"
    return options.Table(f"{title}, averaged every {chosen.every} steps", rows, own=own)
