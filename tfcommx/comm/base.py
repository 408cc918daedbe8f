"""Comm: the collectives and messages of one rank, whatever library carries them.

Every collective takes a group (`world`, `node` or `peers`) and a name. The name must be equal on
all members and not be in flight twice. All members of the group must call, with equal dtype and
shape.
A group of one rank returns its input.

Traffic is counted where it is sent: each call adds what the collective's ring moves for the buffer
that it was given; messages between two ranks are counted one by one.

To add a library, write a subclass of `Comm` in a file of its own: the methods that begin with `_`
and are abstract here, and `gather_objects`. `comm/horovod.py` is the one that trains,
`comm/threads.py` the one for tests; tests/laws walk over every route on the latter.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.comm.membership import Membership
from tfcommx.comm.point_to_point import Channel, PointToPoint
from tfcommx.comm.progress import Progress
from tfcommx.comm.trial_queue import TrialQueue
from tfcommx.cost import alltoall_traffic, broadcast_traffic, ring_traffic
from tfcommx.terms import MPI_LAUNCH, PlanError, Topology, Traffic

MESSAGES_NEED_MPI = (
    "Routes made of messages between two ranks (pipeline, tree, bidirectional) need an MPI launch: "
    f"{MPI_LAUNCH}. Received a Gloo launch. Launch with MPI, or use allreduce or torus."
)


LARGEST_COUNT = 2**31 - 1  # Entries; Gloo and NCCL count in int32


class Comm(abc.ABC):
    """One rank's view of the ranks that it exchanges with.

    Args:
        rank: this process's, in [0, topology.size).
        topology: all ranks and their nodes.
    """

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.topology = topology
        # This rank's number among those of its host, and how many they are
        nodes = [topology.node_of(other) for other in range(topology.size)]
        self.local_rank = nodes[:rank].count(nodes[rank])
        self.local_size = nodes.count(nodes[rank])
        # `lasting=False`: ranks may leave while the others go on; `with_centre`: the process beside
        # them that holds a centre takes part
        self._open_point_to_point: Callable[..., PointToPoint] | None = None
        self._point_to_point: PointToPoint | None = None
        self._own_messages: list[PointToPoint] = []
        # The number, for messages, of a process without training that holds the centres of elastic
        # averaging; None: there is none
        self.centre_rank: int | None = None
        self._with_centre: PointToPoint | None = None
        self._centres = 0
        self._scopes, self._scope = 0, ""
        # What its watcher is told of this rank
        self.progress = Progress()
        # Trials of plans on this rank, which follow each other
        self.trials = TrialQueue()
        # Which ranks have left while this one goes on
        self.membership = Membership()

    def own_scope(self) -> str:
        """Return a name that nobody else has, for `scope`.

        **Ranks:** all, in the same order.
        """
        self._scopes += 1
        return f"tfcommx{self._scopes}/"

    @contextlib.contextmanager
    def scope(self, own: str) -> Iterator[None]:
        """Name the collectives inside after `own`, and after no other scope.

        Horovod identifies a tensor in a graph by its name, and the scopes around it are not equal
        on all ranks: Keras numbers its optimizers, so one that is made on some ranks only would
        make all ranks wait.
        """
        before, self._scope = self._scope, own
        try:
            # A name that ends in a slash is taken as it is; equal names inside it get numbers.
            with tf.name_scope(own):
                yield
        finally:
            self._scope = before

    def members(self, group: str) -> tuple[int, ...]:
        """Return the ranks of this rank's group of that name, ascending."""
        return self.topology.group(group, self.rank)

    def allreduce(
        self, tensor: tf.Tensor, group: str, name: str, counted: bool = True
    ) -> tf.Tensor:
        """Sum over the group; `counted` as traffic.

        Args:
            tensor: any shape that is known while tracing.
            group: world, node or peers.
            name: equal on all members.

        Returns:
            The sum, on every member; same dtype and shape.

        **Ranks:** all members. **Cost:** 2 (p - 1)/p of the buffer sent.
        **Raises:** PlanError for an unknown shape and for more than 2^31 - 1 entries, as all
        collectives.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        if counted:
            sent = 2 * (len(ranks) - 1) / len(ranks) * _bytes(tensor)
            self._count(ring_traffic(sent, group, self.topology))
        return self._allreduce(tensor, group, name)

    def allreduce_list(self, tensors: list[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        """Sum or average each tensor over the world, as plain Horovod does.

        Horovod merges the tensors, and averages them, in a buffer of its own.
        **Ranks:** all. **Cost:** as one allreduce of them all, without a flat copy.
        """
        for tensor in tensors:
            self._check(tensor, "world")
        if self.topology.size == 1:
            return tensors
        sent = 2 * (self.topology.size - 1) / self.topology.size * sum(map(_bytes, tensors))
        self._count(ring_traffic(sent, "world", self.topology))
        return self._allreduce_list(tensors, name, average)

    def reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Sum over the group; member i receives the i-th of p equal shards.

        **Ranks:** all members. **Cost:** (p - 1)/p of the buffer sent.
        **Raises:** PlanError if the first dimension cannot be cut into p equal shards.
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
        """Concatenate the members' tensors, in rank order, on every member; `counted` as traffic.

        **Ranks:** all members. **Cost:** p - 1 times the rank's own buffer sent.
        **Raises:** PlanError if the result has more entries than MPI can count.
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
        """Send the i-th of p equal shards to member i; return those for this rank, in rank order.

        **Ranks:** all members. **Cost:** (p - 1)/p of the buffer sent, each shard directly to its
        rank.
        **Raises:** PlanError if the first dimension cannot be cut into p equal shards.
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

        Args:
            tensor: of equal dtype and shape on all ranks.
            root: the rank whose tensor counts.
            name: equal on all ranks.
            counted: whether it is part of the training steps, and so of their traffic.

        **Ranks:** all. **Cost:** every other rank receives it once, as along a chain.
        """
        if self.topology.size == 1:
            return tensor
        if counted:
            self._count(broadcast_traffic(_bytes(tensor), self.topology))
        return self._broadcast(tensor, root, name)

    @property
    def has_messages(self) -> bool:
        """Whether messages between two ranks are possible here; a single rank needs none."""
        return self._open_point_to_point is not None or self.topology.size == 1

    def open_point_to_point(self) -> PointToPoint | None:
        """Get ready for messages; return None for a single rank, which has none.

        **Ranks:** all, outside of traced code. **Raises:** PlanError without an MPI launch.
        """
        if not self.has_messages:
            raise PlanError(MESSAGES_NEED_MPI)
        if self._point_to_point is None and self.topology.size > 1:
            self._point_to_point = self._open_point_to_point()
        return self._point_to_point

    def open_own_messages(self, counted: bool = True) -> PointToPoint:
        """Return messages that nobody else sends or takes, for ranks that do not meet in steps.

        Args:
            counted: whether they are part of the training, and so of its traffic.

        **Ranks:** all, more than one, in the same order, outside of traced code, under MPI.
        """
        opened = self._open_point_to_point(lasting=False)
        if counted:
            self._own_messages.append(opened)
        return opened

    def open_centre_messages(self) -> PointToPoint:
        """Return messages of their own, for one centre, to the process that holds the centres.

        **Ranks:** all, in the same order, where `centre_rank` is one.
        """
        if self._with_centre is None:
            self._with_centre = self._open_point_to_point(lasting=False, with_centre=True)
            self._own_messages.append(self._with_centre)
        self._centres += 1
        return Channel(self._with_centre, self._centres)

    def run_with_messages(
        self, work: Callable[[np.ndarray, PointToPoint], np.ndarray], tensor: tf.Tensor, name: str
    ) -> tf.Tensor:
        """Run `work(array, messages)` on the host, eagerly or as part of a graph.

        In traced code the calls follow each other in the order in which they were traced, which is
        the plan's and so the same on every rank, also from one `tf.cond` to the next: TensorFlow
        orders what changes a variable, and each call changes one. Without that order, one rank's
        threads could all wait in one bucket while another's wait in the next one, or take the
        messages of another optimizer for their own.

        Args:
            work: takes the tensor as an array, and this rank's PointToPoint; returns an array of
                the same dtype and shape.
            tensor: its shape must be known while tracing.
            name: of the operation in the graph.

        Returns:
            What `work` returned, as a tensor.

        **Ranks:** as the messages need, after `open_point_to_point`.
        **Cost:** on GPUs a copy to the host and back.
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
        """Return the items of all ranks, in rank order; an item must be picklable.

        **Ranks:** all, outside of traced code.
        """

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent so far, inside its node and to other nodes.

        For collectives it is the mean over the ranks, for messages what this rank itself has sent.
        A process that holds a centre counts as one of the last rank's node; what it sends itself
        is no rank's.
        """
        inside, between = self._counted()
        opened = [*self._own_messages, *([self._point_to_point] if self._point_to_point else [])]
        for rank, amount in [pair for one in opened for pair in list(one.sent.items())]:
            if rank == self.rank:  # It may be worker and server
                continue
            # A process that holds a centre is the launch's last
            node = self.topology.node_of(min(rank, self.topology.size - 1))
            if node == self.topology.node_of(self.rank):
                inside += amount
            else:
                between += amount
        return Traffic(inside, between)

    @abc.abstractmethod
    def _counted(self) -> Traffic:
        """Return the bytes of collectives so far."""

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
        self.membership.require_all()
        ranks, entries = self.members(group), tensor.shape.num_elements()
        if entries is None and len(ranks) > 1:
            raise PlanError(
                "A collective needs a tensor whose shape is known while tracing: its bytes are "
                "counted then. Received shape "
                f"{tensor.shape} on rank {self.rank}. Declare it with tf.ensure_shape."
            )
        if entries is not None and entries > LARGEST_COUNT:
            raise PlanError(
                f"A collective carries at most {LARGEST_COUNT} entries. Received {entries}. "
                "Lower `bucket_bytes`, or split the variable."
            )
        return ranks

    # What a library must provide. The arguments are checked, the group has more than one rank, and
    # the traffic is counted; results are as the public methods say.

    @abc.abstractmethod
    def _count(self, sent: Traffic) -> None:
        """Add the bytes of one call to the counters, also in traced code."""

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
