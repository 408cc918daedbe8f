"""Parallel tensor operator: what every rank would compute alike, computed by a share each.

    every rank holds A B C D     rank 0  op(A) op(D)
                                 rank 1  op(B) op(C)    all-gather: op(A) op(B) op(C) op(D)

**Source:** Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2021), section 4.2, equations 13 and 14. The paper deals tensors out by their number;
here by their cost, and only if that takes less time than computing all of them locally.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tfcommx import cost
from tfcommx.comm import process
from tfcommx.comm.base import Comm
from tfcommx.optim.result_bytes import (
    HEAD,
    head_of,
    outcome_of,
    pack,
    size_bytes,
    unpack,
)
from tfcommx.terms import Links, PlanError, check_name

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


def longest_first(costs: Sequence[float], parts: int) -> tuple[tuple[int, ...], ...]:
    """Deal items out so that the parts cost about the same: the longest first, to the least loaded.

    >>> longest_first([5, 1, 4, 2, 3], 2)
    ((0, 3, 1), (2, 4))

    Args:
        costs: of each item, >= 0.
        parts: >= 1.

    Returns:
        The positions of each part's items. No part costs more than 4/3 of the best division.

    **Source:** Graham, "Bounds on Multiprocessing Timing Anomalies" (1969).
    """
    loads, dealt = [0.0] * parts, [[] for _ in range(parts)]
    for position in sorted(range(len(costs)), key=lambda position: -costs[position]):
        part = min(range(parts), key=lambda one: (loads[one], len(dealt[one])))
        loads[part] += costs[position]
        dealt[part].append(position)
    return tuple(map(tuple, dealt))


def parallel_operator(
    op: Operation,
    tensors: Sequence[Item] | tf.Tensor,
    mode: str = "auto",
    group: str = "world",
    cost_of: Callable[[Item], float] | None = None,
    links: Links | str | Path | None = None,
) -> list[tf.Tensor] | tf.Tensor:
    """Compute op(tensors), which every rank could compute alone, together where that is faster.

    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> def norms(items):
    ...     return [tf.norm(item) for item in items]
    >>> found = cx.parallel_operator(norms, [tf.constant([3.0, 4.0]), tf.ones([4])])
    >>> [norm.numpy().item() for norm in found]
    [5.0, 2.0]

    Works eagerly and in traced code, such as a training step of `fit`; under Gloo, MPI and NCCL.
    Which form was chosen, and why, is logged as "tfcommx" at level INFO on rank 0.

    Args:
        op: takes a list of items and returns one tensor for each, of a shape and dtype that follow
            from the item's. It must be pure, and an item's result must not depend on the others.
            Eagerly, give the same function each time: for a new one the choice is made anew.
        tensors: the items: tensors, or tuples of tensors that belong together. Or one long tensor:
            then op([range of rows]) returns one tensor of as many rows. All shapes known while
            tracing. No gradient flows back through a share.
        mode: "local": every rank computes all. "parallel": a share each, then an all-gather.
            "auto": parallel if its price, this rank's share and the all-gather, is below the
            measured time of all.
        group: whose ranks hold the same tensors and share the work, "world" or "node".
        cost_of: the cost of an item of these shapes (tf.TensorSpec), in any unit; None: its
            entries.
        links: what messages cost, or the file that `tfcommx probe` wrote; None: the all-gather is
            timed.

    Returns:
        The results in the order of the items, or one tensor; equal on every rank of the group, and
        to the local form bit by bit. (A share is computed operation by operation; where op is made
        of several, TensorFlow's graph optimizer may merge some of the traced local form's.)

    **Ranks:** all of the world, with equal arguments and tensors of equal shapes; the choice is
    agreed on the first call.
    **Cost:** the first call for some shapes times op on random tensors of these shapes.
    **Raises:** PlanError for wrong arguments, or those that differ between ranks. What op raises on
    one rank ends all: InvalidArgumentError with that error's text and the rank.
    """
    if isinstance(links, str | Path):
        links = Links.read(links)
    operator = _operator(op, mode, group, cost_of, links, process.current())
    return operator(tensors)


@functools.lru_cache(maxsize=64)
def _operator(*arguments: Any) -> ParallelOperator:
    """Keep operators, so that calls with equal arguments find the choice of the first one."""
    return ParallelOperator(*arguments)


class ParallelOperator:
    """`parallel_operator` of one function; it remembers its choices."""

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
            raise PlanError(f"`op` must be a function of a list of tensors. Received {op!r}.")
        self.op, self.mode, self.group, self.links, self.comm = op, mode, group, links, comm
        self.members = comm.members(group)
        self._cost_of = cost_of or _entries
        # Shapes of the items, and whether it is traced -> who computes what
        self._shares: dict[Any, Shares] = {}
        # All-gathers in each graph that was traced
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def choices(self) -> list[Choice]:
        """Return what was chosen so far."""
        return [shares.choice for shares in self._shares.values()]

    @tf.autograph.experimental.do_not_convert
    def __call__(self, tensors: Sequence[Item] | tf.Tensor) -> list[tf.Tensor] | tf.Tensor:
        """Compute op of the items. **Ranks:** all."""
        if isinstance(tensors, list | tuple):
            items = [tf.nest.map_structure(tf.convert_to_tensor, item) for item in tensors]
            return self._compute(items, items)
        whole = tf.convert_to_tensor(tensors)
        rows = whole.shape[0] if whole.shape.rank else None
        if rows is None:
            raise PlanError(
                "One tensor is shared out by ranges of its rows, whose number must be known while "
                f"tracing. Received shape {whole.shape}. Give a list of tensors instead."
            )
        parts = max(1, min(len(self.members), rows))
        sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
        return tf.concat(self._compute(tf.split(whole, sizes), [whole]), axis=0)

    def _compute(self, items: list[Item], local_items: list[Item]) -> list[tf.Tensor]:
        if self.mode == "local" or len(self.members) == 1 or not items:
            return list(self.op(local_items)) if items else []
        specs = [tf.nest.map_structure(_spec, item) for item in items]
        traced = not tf.executing_eagerly()
        key = (str(specs), traced)
        if key not in self._shares:
            with tf.init_scope():
                self._shares[key] = self._plan(specs, len(local_items) < len(items), traced)
        shares = self._shares[key]
        if shares.choice.form == "local":
            return list(self.op(local_items))
        return self._gathered(items, shares)

    # --- The parallel form -----------------------------------------------------------------------

    def _gathered(self, items: list[Item], shares: Shares) -> list[tf.Tensor]:
        """Compute this rank's share and gather all results."""
        own = [items[i] for i in shares.positions[self.members.index(self.comm.rank)]]
        flat, width = tf.nest.flatten(own), shares.width

        def compute(*tensors: tf.Tensor) -> tf.Tensor:
            return self._share(tf.nest.pack_sequence_as(own, tensors), width)

        if tf.executing_eagerly():
            sent = compute(*flat)
        else:  # In Python, where an error can be caught
            # A rank whose share is empty takes part when the others do
            with tf.control_dependencies(tf.nest.flatten(items)[-1:]):
                sent = tf.ensure_shape(tf.py_function(compute, flat, tf.uint8), [HEAD + width])
        with self.comm.scope(shares.scope):
            gathered = self.comm.all_gather(sent, self.group, self._next_name())
        rows = tf.reshape(gathered, [len(self.members), HEAD + width])
        failed, message = outcome_of(rows[:, :HEAD])
        check = tf.debugging.Assert(tf.logical_not(failed), [message])
        with tf.control_dependencies([] if check is None else [check]):
            parts = tf.unstack(rows[:, HEAD:])
        results: list[Any] = [None] * len(items)
        for positions, part in zip(shares.positions, parts, strict=True):
            found = unpack(part, [shares.results[i] for i in positions])
            for position, result in zip(positions, found, strict=True):
                results[position] = result
        return results

    def _next_name(self) -> str:
        """Return a name that no other all-gather of this trace has, the same in every trace.

        One rank alone may trace again, as for a last batch that is shorter.
        """
        graph = tf.compat.v1.get_default_graph()
        while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
            graph = graph.outer_graph  # Branches are graphs of their own
        number = self._calls[graph] = self._calls.get(graph, 0) + 1
        return f"parallel_operator{0 if tf.executing_eagerly() else number}"

    def _share(self, own: list[Item], width: int) -> tf.Tensor:
        """Compute op of this rank's items; return its outcome and its results as bytes.

        Operation by operation: a compiled function inside of an operation of the step would wait
        for threads that the step may keep, forever.
        """
        try:
            results = list(self.op(own)) if own else []
            return tf.concat([head_of(""), pack(results, width)], axis=0)
        except Exception as error:  # Whatever it is, all ranks must hear of it
            text = f"op failed on rank {self.comm.rank}: {type(error).__name__}: {error}"
            return tf.concat([head_of(text), tf.zeros([width], tf.uint8)], axis=0)

    # --- The choice ------------------------------------------------------------------------------

    def _plan(self, specs: list[Item], ranges: bool, traced: bool) -> Shares:
        """Choose the form, and who computes what. **Ranks:** all of the world."""
        results, problem = (), ""
        try:
            results = self._results(specs, ranges)
        except Exception as error:  # It may be this rank's alone
            problem = f"{type(error).__name__}: {error}"
        said = self.comm.gather_objects((problem, str(specs), str(results), self.mode))
        for rank, (found, *rest) in enumerate(said):
            if found:
                raise PlanError(f"op failed while it was tried on rank {rank}: {found}")
            if rest != list(said[0][1:]):
                raise PlanError(
                    "parallel_operator needs equal arguments on every rank. Rank 0 and rank "
                    f"{rank} differ: {said[0][1:]} and {tuple(rest)}."
                )
        costs = [float(self._cost_of(spec)) for spec in specs]
        positions = (
            tuple((i,) if i < len(specs) else () for i in range(len(self.members)))
            if ranges
            else longest_first(costs, len(self.members))
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
        found = tuple(map(_spec, results.structured_outputs))
        if len(found) != len(specs) or (
            ranges
            and any(one.shape[:1] != spec.shape[:1] for one, spec in zip(found, specs, strict=True))
        ):
            raise PlanError(
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
        mine = shares.positions[self.members.index(self.comm.rank)]
        own = functools.cache(lambda: [tf.nest.map_structure(_sample, specs[i]) for i in mine])
        share_s = self._seconds(lambda: self._share(own(), shares.width))
        sent = tf.zeros([HEAD + shares.width], tf.uint8)
        if self.links is None:
            gather_s = self._seconds(
                lambda: self.comm.all_gather(sent, self.group, "parallel_operator/price", False)
            )
        else:
            between = self.group == "world" and self.comm.topology.nodes > 1
            link = self.links.between if between else self.links.inside
            gather_s = cost.all_gather(HEAD + shares.width, len(self.members), link)
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


def _spec(tensor: tf.Tensor) -> tf.TensorSpec:
    if not tensor.shape.is_fully_defined():
        raise PlanError(
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
