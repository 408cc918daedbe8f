"""Plan a `parallel_operator`: the tensors of each rank, and the faster form.

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
# The unit of work: a tensor, or several that belong together
Item = Any
Operation = Callable[[list[Item]], Sequence[tf.Tensor]]
REPEATS = 5  # Timings of each kind of work; the median counts


class Choice(NamedTuple):
    """The form that an operator takes for some tensors, and the reason."""

    # "local" or "parallel"
    form: str
    # For the log
    reason: str
    # Seconds of the slowest rank; NaN if they were not measured
    local_s: float = math.nan
    parallel_s: float = math.nan


class Shares(NamedTuple):
    """The items that each rank computes; equal on all ranks."""

    # For each member of the group: positions of its items
    positions: tuple[tuple[int, ...], ...]
    # For each item: shape and dtype of its result
    results: tuple[tf.TensorSpec, ...]
    choice: Choice
    # Prefix of the all-gathers' names
    scope: str

    @property
    def width(self) -> int:
        """The bytes that each member sends: those of the largest share's results."""
        sizes = [sum(size_bytes(self.results[i]) for i in member) for member in self.positions]
        return max(sizes, default=0)


class SharesPlanner:
    """Assigns items to ranks, for the arguments of one `parallel_operator`."""

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
        # This rank's position among the members
        self.position = self.members.index(comm.rank)
        self._cost_of = cost_of or _entries

    def plan(self, specs: list[Item], ranges: bool, traced: bool) -> Shares:
        """Choose the form, and the items of each rank. **Ranks:** all of the world."""
        results, problem = (), ""
        try:
            results = self._results(specs, ranges)
        except Exception as error:  # Raised below on all ranks, because others may have none
            problem = f"{type(error).__name__}: {error}"
        reports = self.comm.gather_objects((problem, str(specs), str(results), self.mode))
        for rank, (failure, *rest) in enumerate(reports):
            if failure:
                raise ConfigurationError(f"op failed while it was tried on rank {rank}: {failure}")
            if rest != list(reports[0][1:]):
                raise ConfigurationError(
                    "parallel_operator needs equal arguments on every rank. Rank 0 and rank "
                    f"{rank} differ: {reports[0][1:]} and {tuple(rest)}."
                )
        costs = [float(self._cost_of(spec)) for spec in specs]
        # Items without cost count as the least cost that still shows in a large sum, so that they
        # are distributed evenly, too
        least = max(costs, default=0.0) * 1e-6 or 1.0
        costs = [max(cost, least) for cost in costs]
        count = len(self.members)
        owners = list(range(len(specs))) if ranges else balance(costs, count)
        positions = tuple(
            tuple(i for i, owner in enumerate(owners) if owner == member) for member in range(count)
        )
        requested = Choice("parallel", "as asked for")
        shares = Shares(positions, results, requested, self.comm.own_scope())
        if self.mode == "auto":
            shares = shares._replace(choice=self._choose(shares, specs, ranges, traced))
        if self.comm.rank == 0:
            name = getattr(self.op, "__qualname__", repr(self.op))
            log.info("parallel_operator: %s: %s: %s", name, *shares.choice[:2])
        return shares

    def _results(self, specs: list[Item], ranges: bool) -> tuple[tf.TensorSpec, ...]:
        """Return shapes and dtypes of op's results, found by tracing it."""
        traced = tf.function(lambda items: list(self.op(items)), autograph=False)
        results = traced.get_concrete_function(specs)
        results_specs = tuple(map(spec_of, results.structured_outputs))
        if len(results_specs) != len(specs) or (
            ranges
            and any(
                result.shape[:1] != spec.shape[:1]
                for result, spec in zip(results_specs, specs, strict=True)
            )
        ):
            raise ConfigurationError(
                "`op` must return one tensor for each item, and one of as many rows for a range. "
                f"Received {results_specs} for {specs}."
            )
        return results_specs

    def _choose(self, shares: Shares, specs: list[Item], ranges: bool, traced: bool) -> Choice:
        """Compare the prices of both forms; the choice is equal on every rank."""
        items = [_joined(specs)] if ranges else specs
        # Made here, not while tracing, because TensorFlow would fold operations on constants
        samples = tf.nest.map_structure(_sample, items)

        def compute_all() -> list[tf.Tensor]:
            return list(self.op(samples))

        local = tf.function(compute_all, autograph=False) if traced else compute_all
        local_s = self._seconds(lambda: local()[-1])
        positions = shares.positions[self.position]
        own_items = functools.cache(
            lambda: [tf.nest.map_structure(_sample, specs[i]) for i in positions]
        )
        share_s = self._seconds(
            lambda: computed(self.op, own_items(), shares.width, self.comm.rank)
        )
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
        """Time some work on all ranks at once, as it will run; infinity if it fails here."""
        times = []
        for _ in range(REPEATS + 1):
            self.comm.gather_objects(None)  # All start together
            start = time.perf_counter()
            try:
                work().numpy()
                times.append(time.perf_counter() - start)
            except tf.errors.OpError as error:  # The others wait at the next start
                log.info("parallel_operator: this work cannot be timed: %s", error)
                times.append(math.inf)
        return statistics.median(times[1:])  # Without the first, which opens connections


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
    rows = sum(part.shape[0] for part in ranges)
    return tf.TensorSpec([rows, *ranges[0].shape[1:]], ranges[0].dtype)


def _sample(spec: tf.TensorSpec) -> tf.Tensor:
    """Return random numbers, because some ops take less time on zeros."""
    if not spec.dtype.is_floating:
        return tf.zeros(spec.shape, spec.dtype)
    return tf.cast(tf.random.stateless_normal(spec.shape, [1, 2]), spec.dtype)
