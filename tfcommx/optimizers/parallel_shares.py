"""Plan a `parallel_operator`: which rank computes which tensors, and whether it pays.

shapes -> results (op is traced) -> shares of about equal cost -> "local" or "parallel", timed
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfcommx import engines
from tfcommx.collectives.comm import Comm
from tfcommx.core import ConfigurationError, Links, check_name
from tfcommx.optim.result_bytes import HEAD, computed, size_bytes
from tfcommx.planner.plan import balance

log = logging.getLogger("tfcommx")

MODES = ("auto", "local", "parallel")
# What is shared out: a tensor, or several that belong together
Item = Any
Operation = Callable[[list[Item]], Sequence[tf.Tensor]]
REPEATS = 5  # of what is timed; the median counts


class Choice(NamedTuple):
    """Which form an operator takes for some tensors, and why."""

    # "local" or "parallel"
    form: str
    # For people
    reason: str
    # Seconds of the slowest rank; NaN if they were not measured
    local_s: float = math.nan
    parallel_s: float = math.nan


class Shares(NamedTuple):
    """Who computes what, equal on all ranks."""

    # Of each member of the group: positions of its items
    positions: tuple[tuple[int, ...], ...]
    # Of each item
    results: tuple[tf.TensorSpec, ...]
    choice: Choice
    # Names the all-gathers
    scope: str

    @property
    def width(self) -> int:
        """Return the bytes that each member sends: the largest share's results."""
        sizes = [sum(size_bytes(self.results[i]) for i in own) for own in self.positions]
        return max(sizes, default=0)


class SharesPlanner:
    """Decides who computes what, for the arguments of one `parallel_operator`."""

    def __init__(
        self,
        op: Operation,
        mode: str,
        group: str,
        cost_of: Callable[[Item], float] | None,
        links: Links | None,
        comm: Comm,
    ) -> None:
        check_name("mode", mode, MODES)
        check_name("group", group, ("world", "node"))
        if not callable(op):
            raise ConfigurationError(
                f"`op` must be a function of a list of tensors. Received {op!r}."
            )
        self.op, self.mode, self.group, self.links, self.comm = op, mode, group, links, comm
        self.members = comm.members(group)
        # This rank's among the members
        self.place = self.members.index(comm.rank)
        self._cost_of = cost_of or _entries

    def plan(self, specs: list[Item], ranges: bool, traced: bool) -> Shares:
        """Choose the form, and who computes what. **Ranks:** all of the world."""
        results, problem = (), ""
        try:
            results = self._results(specs, ranges)
        except Exception as error:  # It may be this rank's alone
            problem = f"{type(error).__name__}: {error}"
        said = self.comm.gather_objects((problem, str(specs), str(results), self.mode))
        for rank, (found, *rest) in enumerate(said):
            if found:
                raise ConfigurationError(f"op failed while it was tried on rank {rank}: {found}")
            if rest != list(said[0][1:]):
                raise ConfigurationError(
                    "parallel_operator needs equal arguments on every rank. Rank 0 and rank "
                    f"{rank} differ: {said[0][1:]} and {tuple(rest)}."
                )
        costs = [float(self._cost_of(spec)) for spec in specs]
        # What costs nothing is dealt out evenly, too: the least that a large load's sum still shows
        least = max(costs, default=0.0) * 1e-6 or 1.0
        costs = [max(cost, least) for cost in costs]
        count = len(self.members)
        owners = list(range(len(specs))) if ranges else balance(costs, count)
        positions = tuple(
            tuple(i for i, owner in enumerate(owners) if owner == member) for member in range(count)
        )
        asked = Choice("parallel", "as asked for")
        shares = Shares(positions, results, asked, self.comm.own_scope())
        if self.mode == "auto":
            shares = shares._replace(choice=self._choose(shares, specs, ranges, traced))
        if self.comm.rank == 0:
            name = getattr(self.op, "__qualname__", repr(self.op))
            log.info("parallel_operator: %s: %s: %s", name, *shares.choice[:2])
        return shares

    def _results(self, specs: list[Item], ranges: bool) -> tuple[tf.TensorSpec, ...]:
        """Return what op makes of the items, found by tracing it."""
        traced = tf.function(lambda items: list(self.op(items)), autograph=False)
        results = traced.get_concrete_function(specs)
        found = tuple(map(spec_of, results.structured_outputs))
        if len(found) != len(specs) or (
            ranges
            and any(one.shape[:1] != spec.shape[:1] for one, spec in zip(found, specs, strict=True))
        ):
            raise ConfigurationError(
                "`op` must return one tensor for each item, and one of as many rows for a range. "
                f"Received {found} for {specs}."
            )
        return found

    def _choose(self, shares: Shares, specs: list[Item], ranges: bool, traced: bool) -> Choice:
        """Compare the prices of both forms, the same on every rank."""
        whole = [_joined(specs)] if ranges else specs
        # Made here, not while tracing: TensorFlow computes once, and never again, what it can
        # make of constants
        samples = tf.nest.map_structure(_sample, whole)

        def compute_all() -> list[tf.Tensor]:
            return list(self.op(samples))

        local = tf.function(compute_all, autograph=False) if traced else compute_all
        local_s = self._seconds(lambda: local()[-1])
        mine = shares.positions[self.place]
        own = functools.cache(lambda: [tf.nest.map_structure(_sample, specs[i]) for i in mine])
        share_s = self._seconds(lambda: computed(self.op, own(), shares.width, self.comm.rank))
        sent = tf.zeros([HEAD + shares.width], tf.uint8)
        if self.links is None:
            gather_s = self._seconds(
                lambda: self.comm.all_gather(sent, self.group, "parallel_operator/price", False)
            )
        else:
            gather_s = engines.gather_seconds(
                HEAD + shares.width, self.group, self.comm.topology, self.links
            )
        measured = self.comm.gather_objects((local_s, share_s, gather_s))
        local_s, share_s, gather_s = map(max, zip(*measured, strict=True))
        if math.inf in (local_s, share_s):
            return Choice("local", "op fails on random numbers, so that it cannot be timed")
        form = "parallel" if share_s + gather_s < local_s else "local"
        reason = (
            f"all locally {local_s * 1e3:.2f} ms; in parallel {share_s * 1e3:.2f} ms for the "
            f"largest share and {gather_s * 1e3:.2f} ms for the all-gather"
        )
        return Choice(form, reason, local_s, share_s + gather_s)

    def _seconds(self, work: Callable[[], tf.Tensor]) -> float:
        """Time some work on all ranks at once, as it will run; infinity if it fails on this one."""
        times = []
        for _ in range(REPEATS + 1):
            self.comm.gather_objects(None)  # All start together
            start = time.perf_counter()
            try:
                work().numpy()
                times.append(time.perf_counter() - start)
            except tf.errors.OpError as error:  # The others are at the next start
                log.info("parallel_operator: this work cannot be timed: %s", error)
                times.append(math.inf)
        return statistics.median(times[1:])  # The first one makes connections


def spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return shape and dtype. **Raises:** ConfigurationError for a shape that is not known."""
    if not tensor.shape.is_fully_defined():
        raise ConfigurationError(
            "parallel_operator needs tensors and results whose shapes are known while tracing. "
            f"Received shape {tensor.shape}. Declare it with tf.ensure_shape."
        )
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _entries(item: Item) -> int:
    return sum(spec.shape.num_elements() for spec in tf.nest.flatten(item))


def _joined(ranges: Sequence[tf.TensorSpec]) -> tf.TensorSpec:
    rows = sum(one.shape[0] for one in ranges)
    return tf.TensorSpec([rows, *ranges[0].shape[1:]], ranges[0].dtype)


def _sample(spec: tf.TensorSpec) -> tf.Tensor:
    """Make random numbers: on zeros some ops take less time."""
    if not spec.dtype.is_floating:
        return tf.zeros(spec.shape, spec.dtype)
    return tf.cast(tf.random.stateless_normal(spec.shape, [1, 2]), spec.dtype)
