"""Compute a share of a list of tensors on each rank, and gather the results.

    every rank holds A B C D     rank 0  op(A) op(D)
                                 rank 1  op(B) op(C)    all-gather: op(A) op(B) op(C) op(D)

Items are assigned to ranks once for some shapes:

    shapes -> results (op is traced) -> shares of about equal cost -> "local" or "parallel", timed

A share's results, of any dtype, or the text of an error, are one vector of bytes (`computed`).

**Source:** Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2021), section 4.2, equations 13 and 14. The paper distributes tensors by their number;
we distribute them by their cost, and only if that is faster than computing all of them locally.
"""

import functools
import itertools
import math
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tfcommx.collectives import process
from tfcommx.collectives.comm import Comm
from tfcommx.core import ConfigurationError, check_name, log
from tfcommx.planner.plan import balance

MODES = ("auto", "local", "parallel")
# The unit of work: a tensor, or several that belong together
Item = Any
Operation = Callable[[list[Item]], Sequence[tf.Tensor]]
REPEATS = 5  # Timings of each kind of work; the median counts
HEAD = 512  # Bytes of the head: the text of an error, padded with zeros; all zeros: none


class Choice(NamedTuple):
    """The form that an operator takes for some tensors, and the reason."""

    # "local" or "parallel"
    form: str
    # For the log
    reason: str


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
        # Equal for all, because all-gathers of unequal parts are slow on NCCL
        sizes = [sum(size_bytes(self.results[i]) for i in member) for member in self.positions]
        return max(sizes, default=0)


def parallel_operator(
    op: Operation,
    tensors: Sequence[Item] | tf.Tensor,
    mode: str = "auto",
    group: str = "world",
) -> list[tf.Tensor] | tf.Tensor:
    """Compute op(tensors), which every rank could compute alone, together if that is faster.

    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> def norms(items):
    ...     return [tf.norm(item) for item in items]
    >>> results = cx.parallel_operator(norms, [tf.constant([3.0, 4.0]), tf.ones([4])])
    >>> [norm.numpy().item() for norm in results]
    [5.0, 2.0]

    Works eagerly and in traced code, such as a training step of `fit`; under Gloo, MPI and NCCL.
    The chosen form and the reason are logged as "tfcommx" at level INFO on rank 0.

    Args:
        op: takes a list of items and returns one tensor for each, of a shape and dtype that follow
            from the item's. It must be pure, and an item's result must not depend on the others.
            Eagerly, pass the same function each time: a new function needs a new choice.
        tensors: the items: tensors, or tuples of tensors that belong together. Or one long tensor:
            then op([range of rows]) returns one tensor of as many rows. All shapes known while
            tracing. No gradient flows back through a share.
        mode: "local": every rank computes all. "parallel": a share each, then an all-gather.
            "auto": parallel if this rank's share and the all-gather take less time than all.
        group: the ranks that hold the same tensors and share the work, "world" or "node".

    Returns:
        The results in the order of the items, or one tensor; equal on every rank of the group, and
        to the local form bit by bit. (With an op of several operations there may be differences,
        because TensorFlow's graph optimizer may merge operations of the traced local form, while a
        share is computed operation by operation.)

    **Ranks:** all of the world, with equal arguments and tensors of equal shapes; the choice is
    agreed on the first call.
    **Cost:** the first call for some shapes times op on random tensors of these shapes.
    **Raises:** ConfigurationError for wrong arguments, or those that differ between ranks. If op
    raises on one rank, all raise InvalidArgumentError with that error's text and the rank.
    """
    return _operator(op, mode, group, process.current())(tensors)


class ParallelOperator:
    """`parallel_operator` for some arguments, with a cache of its shares by shapes."""

    def __init__(self, op: Operation, mode: str, group: str, comm: Comm) -> None:
        check_name("mode", mode, MODES)
        check_name("group", group, ("world", "node"))
        if not callable(op):
            raise ConfigurationError(
                f"`op` must be a function of a list of tensors. Received {op!r}."
            )
        self.op, self.mode, self.group, self.comm = op, mode, group, comm
        self.members = comm.members(group)
        # This rank's position among the members
        self.position = self.members.index(comm.rank)
        # (shapes of the items, True if traced) -> shares
        self._shares: dict[Any, Shares] = {}
        # Graph -> number of its all-gathers
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    # AutoGraph would convert this Python code, too, inside a caller's loop
    @tf.autograph.experimental.do_not_convert
    def __call__(self, tensors: Sequence[Item] | tf.Tensor) -> list[tf.Tensor] | tf.Tensor:
        """Compute op of the items. **Ranks:** all."""
        if isinstance(tensors, list | tuple):
            items = [tf.nest.map_structure(tf.convert_to_tensor, item) for item in tensors]
            return self._compute(items, items)
        tensor = tf.convert_to_tensor(tensors)
        rows = tensor.shape[0] if tensor.shape.rank else None
        if rows is None:
            raise ConfigurationError(
                "One tensor is shared out by ranges of its rows, whose number must be known while "
                f"tracing. Received shape {tensor.shape}. Give a list of tensors instead."
            )
        parts = max(1, min(len(self.members), rows))
        sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
        return tf.concat(self._compute(tf.split(tensor, sizes), [tensor]), axis=0)

    def _compute(self, items: list[Item], local_items: list[Item]) -> list[tf.Tensor]:
        if self.mode == "local" or len(self.members) == 1 or not items:
            return list(self.op(local_items)) if items else []
        specs = [tf.nest.map_structure(spec_of, item) for item in items]
        traced = not tf.executing_eagerly()
        # In a graph and eagerly `op` takes different times, so each has its own choice
        key = (str(specs), traced)
        if key not in self._shares:
            # Outside of the graph, because planning exchanges objects and times the work
            with tf.init_scope():
                ranges = len(local_items) < len(items)
                self._shares[key] = self.plan(specs, ranges, traced)
        shares = self._shares[key]
        if shares.choice.form == "local":
            return list(self.op(local_items))
        return self._gathered(items, shares)

    def _gathered(self, items: list[Item], shares: Shares) -> list[tf.Tensor]:
        """Compute this rank's share and gather all results."""
        share_items = [items[i] for i in shares.positions[self.position]]
        flat, width = tf.nest.flatten(share_items), shares.width

        def compute(*tensors: tf.Tensor) -> tf.Tensor:
            share = tf.nest.pack_sequence_as(share_items, tensors)
            return computed(self.op, share, width, self.comm.rank)

        if tf.executing_eagerly():
            sent = compute(*flat)
        else:  # In Python, where an error can be caught
            # Otherwise a rank with an empty share would join the all-gather before the others
            with tf.control_dependencies(tf.nest.flatten(items)[-1:]):
                sent = tf.ensure_shape(tf.py_function(compute, flat, tf.uint8), [HEAD + width])
        with self.comm.scope(shares.scope):
            gathered = self.comm.all_gather(sent, self.group, self._next_name())
        rows = tf.reshape(gathered, [len(self.members), HEAD + width])
        failed, message = outcome_of(rows[:, :HEAD])
        check = tf.debugging.Assert(tf.logical_not(failed), [message])
        # Assert returns None eagerly, where it has raised at once
        with tf.control_dependencies([] if check is None else [check]):
            parts = tf.unstack(rows[:, HEAD:])
        results: list[Any] = [None] * len(items)
        for positions, part in zip(shares.positions, parts, strict=True):
            unpacked = unpack(part, [shares.results[i] for i in positions])
            for position, result in zip(positions, unpacked, strict=True):
                results[position] = result
        return results

    def _next_name(self) -> str:
        """Return a name that is unique among the all-gathers of a trace, equal in every trace."""
        # Equal, because one rank alone may trace again, for instance for a shorter last batch
        graph = tf.compat.v1.get_default_graph()
        while isinstance(getattr(graph, "outer_graph", None), FuncGraph):
            graph = graph.outer_graph  # A branch has a separate graph
        number = self._calls[graph] = self._calls.get(graph, 0) + 1
        # Horovod ignores the names of eager collectives
        return f"parallel_operator{0 if tf.executing_eagerly() else number}"

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
        sizes = (sum(x.shape.num_elements() for x in tf.nest.flatten(item)) for item in specs)
        costs = [max(size, 1) for size in sizes]  # So that empty items are distributed evenly
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
        """Compare the times of both forms; the choice is equal on every rank."""
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
        gather_s = self._seconds(
            lambda: self.comm.all_gather(sent, self.group, "parallel_operator/price", False)
        )
        measured = self.comm.gather_objects((local_s, share_s, gather_s))
        # The slowest rank's times, because all wait for it, and the choice must be the same on all
        local_s, share_s, gather_s = map(max, zip(*measured, strict=True))
        if math.inf in (local_s, share_s):
            return Choice("local", "op fails on random numbers, so that it cannot be timed")
        form = "parallel" if share_s + gather_s < local_s else "local"
        reason = (
            f"all locally {local_s * 1e3:.2f} ms; in parallel {share_s * 1e3:.2f} ms for the "
            f"largest share and {gather_s * 1e3:.2f} ms for the all-gather"
        )
        return Choice(form, reason)

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


# Calls with equal arguments reuse the choice of the first one. Bounded, because an eager caller may
# pass a new function in each call
_operator = functools.lru_cache(maxsize=64)(ParallelOperator)


def spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return shape and dtype. **Raises:** ConfigurationError for a shape that is not known."""
    if not tensor.shape.is_fully_defined():
        raise ConfigurationError(
            "parallel_operator needs tensors and results whose shapes are known while tracing. "
            f"Received shape {tensor.shape}. Declare it with tf.ensure_shape."
        )
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _joined(ranges: Sequence[tf.TensorSpec]) -> tf.TensorSpec:
    rows = sum(part.shape[0] for part in ranges)
    return tf.TensorSpec([rows, *ranges[0].shape[1:]], ranges[0].dtype)


def _sample(spec: tf.TensorSpec) -> tf.Tensor:
    """Return random numbers, because some ops take less time on zeros."""
    if not spec.dtype.is_floating:
        return tf.zeros(spec.shape, spec.dtype)
    return tf.cast(tf.random.stateless_normal(spec.shape, [1, 2]), spec.dtype)


def computed(
    op: Callable[[list[Any]], Sequence[tf.Tensor]], items: list[Any], width: int, rank: int
) -> tf.Tensor:
    """Compute op of a share's items; return head and results, uint8 [HEAD + width].

    Runs eagerly, because a compiled function inside of an operation of the step would wait forever
    for threads that the step may hold.
    """
    try:
        results = list(op(items)) if items else []
        return tf.concat([head_of(""), pack(results, width)], axis=0)
    except Exception as error:  # Any exception: all ranks must receive it
        text = f"op failed on rank {rank}: {type(error).__name__}: {error}"
        return tf.concat([head_of(text), tf.zeros([width], tf.uint8)], axis=0)


def size_bytes(spec: tf.TensorSpec) -> int:
    """Return the bytes of a result."""
    return int(spec.shape.num_elements() * spec.dtype.size)


def head_of(text: str) -> tf.Tensor:
    """Return the head, uint8 [HEAD], of a share that failed with this text; "": that did not."""
    # ASCII, so that the text can be cut at any byte; zeros are the padding of the head
    written = text.encode("ascii", "replace").replace(b"\0", b" ")[:HEAD]
    return tf.constant(np.frombuffer(written.ljust(HEAD, b"\0"), np.uint8))


def outcome_of(heads: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return True if any share of the heads, uint8 [shares, HEAD], failed, and the first's text."""
    failed = heads[:, 0] != 0
    first = tf.gather(heads, tf.argmax(tf.cast(failed, tf.int32)))
    letters = tf.cast(tf.boolean_mask(first, first != 0), tf.int32)
    return tf.reduce_any(failed), tf.strings.unicode_encode(letters, "UTF-8")


def pack(results: Sequence[tf.Tensor], width: int) -> tf.Tensor:
    """Return the bytes of some results one after another, padded to uint8 [width].

    **Cost:** few operations: neighbours of one dtype are joined first, those of one shape at once.
    """
    parts = []
    for dtype, run in itertools.groupby(
        map(tf.convert_to_tensor, results), lambda tensor: tensor.dtype
    ):
        group = list(run)
        alike = all(tensor.shape == group[0].shape for tensor in group)
        joined = (
            tf.reshape(tf.stack(group), [-1])
            if alike
            else tf.concat([tf.reshape(tensor, [-1]) for tensor in group], axis=0)
        )
        # `tf.bitcast` refuses booleans
        written = tf.cast(joined, tf.uint8) if dtype == tf.bool else tf.bitcast(joined, tf.uint8)
        parts.append(tf.reshape(written, [-1]))
    used = sum(part.shape[0] for part in parts)
    return tf.concat([*parts, tf.zeros([width - used], tf.uint8)], axis=0)


def unpack(row: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Return the results of these shapes and dtypes that `pack` made a row of."""
    results, start = [], 0
    for dtype, run in itertools.groupby(specs, lambda spec: spec.dtype):
        group = list(run)
        counts = [spec.shape.num_elements() for spec in group]
        end = start + sum(counts) * dtype.size
        joined, start = _from_bytes(row[start:end], dtype), end
        if all(spec.shape == group[0].shape for spec in group):
            results += tf.unstack(tf.reshape(joined, [len(group), *group[0].shape]))
        else:
            parts = tf.split(joined, counts)
            results += [
                tf.reshape(part, spec.shape) for part, spec in zip(parts, group, strict=True)
            ]
    return results


def _from_bytes(part: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bool:
        return part != 0
    if dtype.size == 1:
        return tf.bitcast(part, dtype)
    return tf.bitcast(tf.reshape(part, [-1, dtype.size]), dtype)
