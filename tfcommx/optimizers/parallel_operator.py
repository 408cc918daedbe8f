"""Compute a share of a list of tensors on each rank, and gather the results.

    every rank holds A B C D     rank 0  op(A) op(D)
                                 rank 1  op(B) op(C)    all-gather: op(A) op(B) op(C) op(D)

`parallel_shares` assigns items to ranks, once for some shapes, and encodes the results of a share;
this file computes the shares in each call.

**Source:** Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2021), section 4.2, equations 13 and 14. The paper distributes tensors by their number;
we distribute them by their cost, and only if that is faster than computing all of them locally.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tfcommx.collectives import process
from tfcommx.core import ConfigurationError, Links
from tfcommx.optimizers.parallel_shares import (
    HEAD,
    Item,
    Operation,
    Shares,
    SharesPlanner,
    computed,
    outcome_of,
    spec_of,
    unpack,
)


def parallel_operator(
    op: Operation,
    tensors: Sequence[Item] | tf.Tensor,
    mode: str = "auto",
    group: str = "world",
    cost_of: Callable[[Item], float] | None = None,
    links: Links | str | Path | None = None,
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
            "auto": parallel if its price, this rank's share and the all-gather, is below the
            measured time of all.
        group: the ranks that hold the same tensors and share the work, "world" or "node".
        cost_of: the cost of an item of these shapes (tf.TensorSpec), in any unit; None: its
            number of entries.
        links: the price of messages, or the file that `tfcommx probe` wrote; None: the all-gather
            is timed.

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
    if isinstance(links, str | Path):
        links = Links.read(links)
    operator = _operator(op, mode, group, cost_of, links, process.current())
    return operator(tensors)


# Bounded, because an eager caller may pass a new function in each call
@functools.lru_cache(maxsize=64)
def _operator(*arguments: Any) -> ParallelOperator:
    """Cache operators, so that calls with equal arguments reuse the choice of the first one."""
    return ParallelOperator(SharesPlanner(*arguments))


class ParallelOperator:
    """`parallel_operator` of one function, with a cache of its shares by shapes."""

    def __init__(self, planner: SharesPlanner) -> None:
        self._planner = planner
        self.op, self.mode, self.group = planner.op, planner.mode, planner.group
        self.comm = planner.comm
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
        parts = max(1, min(len(self._planner.members), rows))
        sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
        return tf.concat(self._compute(tf.split(tensor, sizes), [tensor]), axis=0)

    def _compute(self, items: list[Item], local_items: list[Item]) -> list[tf.Tensor]:
        if self.mode == "local" or len(self._planner.members) == 1 or not items:
            return list(self.op(local_items)) if items else []
        specs = [tf.nest.map_structure(spec_of, item) for item in items]
        traced = not tf.executing_eagerly()
        # In a graph and eagerly `op` takes different times, so each has its own choice
        key = (str(specs), traced)
        if key not in self._shares:
            # Outside of the graph, because planning exchanges objects and times the work
            with tf.init_scope():
                ranges = len(local_items) < len(items)
                self._shares[key] = self._planner.plan(specs, ranges, traced)
        shares = self._shares[key]
        if shares.choice.form == "local":
            return list(self.op(local_items))
        return self._gathered(items, shares)

    def _gathered(self, items: list[Item], shares: Shares) -> list[tf.Tensor]:
        """Compute this rank's share and gather all results."""
        share_items = [items[i] for i in shares.positions[self._planner.position]]
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
        rows = tf.reshape(gathered, [len(self._planner.members), HEAD + width])
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
