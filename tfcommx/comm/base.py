"""Collectives on the groups of a topology. The only door to Horovod.

Every collective takes a group (`world`, `node` or `peers`) and a name that must be equal on all
members and not be in flight twice. All members of the group must call, with equal dtype and shape.
A group of one returns its input.

Traffic is counted where it is sent: each call adds what the collective's ring moves for the buffer
that it was given, and messages between two ranks add themselves.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfcommx.cost import alltoall_traffic, broadcast_traffic, ring_traffic
from tfcommx.terms import MPI_LAUNCH, PlanError, Topology, Traffic

MESSAGES_NEED_MPI = (
    "Routes made of messages between two ranks (pipeline, tree, bidirectional) need an MPI launch: "
    f"{MPI_LAUNCH}. Received a Gloo launch. Launch with MPI, or use allreduce or torus."
)


LARGEST_COUNT = 2**31 - 1  # entries; Gloo and NCCL count in int32


class PointToPoint(Protocol):
    """Messages between two ranks. A request is what `send` and `receive` return; buffers must live
    until it is done.
    """

    # Rank -> bytes sent to it so far
    sent: dict[int, int]

    def send(self, array: np.ndarray, target: int, tag: int) -> Any:
        """Start to send a contiguous array to a rank of the world. Does not wait."""

    def receive(self, array: np.ndarray, source: int, tag: int) -> Any:
        """Start to receive into a contiguous array of equal length; messages of one pair and tag
        arrive in order.
        """

    def wait_any(self, requests: list[Any]) -> int:
        """Wait until one of the requests is done; return its position."""


class Comm(abc.ABC):
    """One rank's view of the ranks it exchanges with."""

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.topology = topology
        self._open_point_to_point: Callable[[], PointToPoint] | None = None
        self._point_to_point: PointToPoint | None = None
        self._scopes, self._scope = 0, ""

    def own_scope(self) -> str:
        """Return a name that nobody else has, for `scope`. **Ranks:** all, in the same order."""
        self._scopes += 1
        return f"tfcommx{self._scopes}/"

    @contextlib.contextmanager
    def scope(self, own: str) -> Iterator[None]:
        """Name the collectives within after `own`, and after nothing else.

        Horovod knows a tensor in a graph by its name, and the scopes around it are not equal on all
        ranks: Keras numbers its optimizers, so that one which is made on some ranks only would make
        all ranks wait.
        """
        before, self._scope = self._scope, own
        try:
            # that ends in a slash: it stands alone, and what is named twice in it gets a number
            with tf.name_scope(own):
                yield
        finally:
            self._scope = before

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of my group of that name, ascending."""
        return self.topology.group(group, self.rank)

    def allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Sum over the group. **Cost:** 2 (p - 1)/p of the buffer sent."""
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        self._count(
            ring_traffic(2 * (len(ranks) - 1) / len(ranks) * _bytes(tensor), group, self.topology)
        )
        return self._allreduce(tensor, group, name)

    def allreduce_list(self, tensors: list[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        """Sum or average each tensor over the world, as plain Horovod does: it merges and averages
        in its own buffer.

        **Cost:** as one allreduce of them all, without a flat copy.
        """
        for tensor in tensors:
            self._check(tensor, "world")
        if self.topology.size == 1:
            return tensors
        sent = 2 * (self.topology.size - 1) / self.topology.size * sum(map(_bytes, tensors))
        self._count(ring_traffic(sent, "world", self.topology))
        return self._allreduce_list(tensors, name, average)

    def reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Sum over the group; member i receives the i-th of p equal shards. **Cost:** (p - 1)/p of
        the buffer sent.

        **Raises:** PlanError where the first dimension cannot be cut into p equal shards.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        self._check_shards("reduce_scatter", tensor, ranks, name)
        self._count(
            ring_traffic((len(ranks) - 1) / len(ranks) * _bytes(tensor), group, self.topology)
        )
        return self._reduce_scatter(tensor, group, name)

    def all_gather(
        self, tensor: tf.Tensor, group: str, name: str, counted: bool = True
    ) -> tf.Tensor:
        """Concatenate the members' tensors, in rank order, on every member. **Cost:** p - 1 times
        the own buffer sent.

        **Raises:** PlanError where the result has more entries than MPI can count.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        if (entries := len(ranks) * tensor.shape.num_elements()) > LARGEST_COUNT:
            raise PlanError(
                f"An all-gather brings at most {LARGEST_COUNT} entries together. {name!r} brings "
                f"{entries} from {len(ranks)} "
                "ranks. Lower `density`, `bucket_bytes`, or the wire format's bytes."
            )
        if counted:
            self._count(ring_traffic((len(ranks) - 1) * _bytes(tensor), group, self.topology))
        return self._all_gather(tensor, group, name)

    def alltoall(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Cut into p equal shards and send the i-th to member i; return the shards meant for me, in
        rank order.

        **Cost:** (p - 1)/p of the buffer sent, straight to where it is needed: the share between
        nodes is what leaves them.
        **Raises:** PlanError where the first dimension cannot be cut into p equal shards.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        self._check_shards("alltoall", tensor, ranks, name)
        self._count(
            alltoall_traffic((len(ranks) - 1) / len(ranks) * _bytes(tensor), group, self.topology)
        )
        return self._alltoall(tensor, group, name)

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, counted: bool = False
    ) -> tf.Tensor:
        """Return the tensor of rank `root` on every rank of the world.

        **Cost:** every other rank receives it once; counted, as along a chain, where it is part of
        the training steps.
        """
        if self.topology.size == 1:
            return tensor
        if counted:
            self._count(broadcast_traffic(_bytes(tensor), self.topology))
        return self._broadcast(tensor, root, name)

    @property
    def has_messages(self) -> bool:
        """Tell whether messages between two ranks are possible here; one rank alone needs none."""
        return self._open_point_to_point is not None or self.topology.size == 1

    def open_point_to_point(self) -> PointToPoint | None:
        """Get ready for messages; one rank alone has none. **Ranks:** all, outside of traced code.

        **Raises:** PlanError without an MPI launch.
        """
        if not self.has_messages:
            raise PlanError(MESSAGES_NEED_MPI)
        if self._point_to_point is None and self.topology.size > 1:
            self._point_to_point = self._open_point_to_point()
        return self._point_to_point

    def by_messages(
        self, work: Callable[[np.ndarray, PointToPoint], np.ndarray], tensor: tf.Tensor, name: str
    ) -> tf.Tensor:
        """Return `work(array, post)`: on the host, with messages between ranks; dtype and shape as
        the tensor's.

        In traced code the calls follow each other in the order in which they were traced, which is
        the plan's and so the same on every rank, also from one `tf.cond` to the next: TensorFlow
        orders what changes a variable, and each call changes one. Without that order, one rank's
        threads could all wait in one bucket while another's wait in the next one, or take the
        messages of another optimizer for their own.

        **Ranks:** as the messages need. `open_point_to_point` must have been called.
        **Cost:** a copy to the host and back on GPUs.
        """

        def call(array: np.ndarray) -> np.ndarray:
            return work(array, self._point_to_point)

        if tf.executing_eagerly():
            return tf.constant(call(tensor.numpy()))
        with tf.device("/cpu:0"):
            with tf.control_dependencies([self._calls.assign_add(1)]):
                result = tf.numpy_function(
                    call, [tensor], tensor.dtype, name=name.replace("/", "_")
                )
            with tf.control_dependencies([result]):
                self._calls.assign_add(1)
        return tf.ensure_shape(result, tensor.shape)

    @functools.cached_property
    def _calls(self) -> tf.Variable:
        with tf.init_scope(), tf.device("/cpu:0"):
            return tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/calls")

    @abc.abstractmethod
    def gather_objects(self, item: Any) -> list[Any]:
        """Return every rank's (picklable) item, in rank order. **Ranks:** all, outside of traced
        code.
        """

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent so far: of collectives the mean over the ranks,
        of messages its own.
        """
        inside, between = self._counted()
        for rank, amount in (self._point_to_point.sent if self._point_to_point else {}).items():
            if self.topology.node_of(rank) == self.topology.node_of(self.rank):
                inside += amount
            else:
                between += amount
        return Traffic(inside, between)

    @abc.abstractmethod
    def _counted(self) -> Traffic: ...

    def _check_shards(
        self, what: str, tensor: tf.Tensor, ranks: tuple[int, ...], name: str
    ) -> None:
        if tensor.shape[0] % len(ranks):
            raise PlanError(
                f"{what} {name!r} needs a length that {len(ranks)} ranks divide. Received "
                f"{tensor.shape[0]} "
                f"on rank {self.rank}. Pad the buffer."
            )

    def _check(self, tensor: tf.Tensor, group: str) -> tuple[int, ...]:
        ranks, entries = self.members(group), tensor.shape.num_elements()
        if entries is None and len(ranks) > 1:
            raise PlanError(
                "A collective needs a tensor whose shape is known while tracing: its bytes are "
                "counted then. Received shape "
                f"{tensor.shape} on rank {self.rank}. Say it: tf.ensure_shape."
            )
        if entries is not None and entries > LARGEST_COUNT:
            raise PlanError(
                f"A collective carries at most {LARGEST_COUNT} entries. Received {entries}. "
                "Lower `bucket_bytes`, or split the variable."
            )
        return ranks

    @abc.abstractmethod
    def _count(self, sent: Traffic) -> None: ...

    @abc.abstractmethod
    def _allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _allreduce_list(
        self, tensors: list[tf.Tensor], name: str, average: bool
    ) -> list[tf.Tensor]: ...

    @abc.abstractmethod
    def _reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _alltoall(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor: ...

    @abc.abstractmethod
    def _broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor: ...


def _bytes(tensor: tf.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.size
