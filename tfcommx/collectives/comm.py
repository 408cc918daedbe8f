"""Comm: the collectives of one rank, independent of the library that carries them out.

Every collective takes a group (`world`, `node` or `peers`) and a name that is equal on all members
and not in flight twice. All members call it, with equal dtype and shape. In a group of one rank it
returns its input. Each call counts the bytes that the collective's ring sends for its buffer.

To add a library, write a subclass of `Comm` in a separate file, with the abstract methods, whose
names begin with `_`. `collectives/horovod.py` is used in training, `collectives/threads.py` in
tests; tests/laws run every route on the latter.

`TrialQueue` chooses the plan that is measured, of several under trial on one rank. `WatchedSum` is
a small sum over the ranks within a step, which the stall watch can name.
"""

import abc
import contextlib
import math
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn, TypeVar

import tensorflow as tf

from tfcommx.collectives.comparisons import Comparisons
from tfcommx.collectives.messages import Messages
from tfcommx.collectives.plain_data import decode, encode
from tfcommx.core import ConfigurationError, PlanError, Topology, Traffic
from tfcommx.core.cost import alltoall_traffic, broadcast_traffic, ring_traffic
from tfcommx.watch.membership import Membership
from tfcommx.watch.progress import Progress, function_of, source_line

T = TypeVar("T")
# Number of calls of other members after which an inactive member is skipped
IDLE = 8


class TrialQueue:
    """Members in the order of their first call; inactive members are skipped.

    >>> class Trial:
    ...     pass
    >>> queue, first, second = TrialQueue(), Trial(), Trial()
    >>> queue.is_first(first), queue.is_first(second), queue.is_first(first)
    (True, False, True)
    >>> [queue.is_first(second) for _ in range(IDLE)].index(True)
    7
    >>> queue.leave(first)
    >>> queue.is_first(second)
    True
    """

    def __init__(self) -> None:
        # Member -> number of its last call, in the order of their first calls
        self._last: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._now = 0

    def is_first(self, member: object) -> bool:
        """Record that a member, perhaps a new one, is active; return True if it is the first."""
        # Calls are counted in place of seconds, because all ranks must skip a member at the same
        # step
        self._now += 1
        self._last[member] = self._now
        return member is next(
            candidate for candidate, last in self._last.items() if self._now - last < IDLE
        )

    def leave(self, member: object) -> None:
        self._last.pop(member, None)


LARGEST_COUNT = 2**31 - 1  # Entries; Gloo and NCCL count in int32
# Bytes of each rank in an all-gather; for NCCL, Horovod computes them in int32
LARGEST_GATHERED_BYTES = 2**31 - 1


def largest_part(ranks: int, size: int) -> int:
    """Return the most entries, of so many bytes each, that a rank may give to an all-gather."""
    return min(LARGEST_COUNT // ranks, LARGEST_GATHERED_BYTES // size)


class _OpenScope(threading.local):
    """The scope of each thread; one may exchange while another traces or computes."""

    name = ""


class Comm(abc.ABC):
    """One rank's view of the ranks that it exchanges with."""

    def __init__(self, rank: int, topology: Topology, messages: Messages) -> None:
        self.rank, self.topology, self.messages = rank, topology, messages
        # This rank's number on its host, and the number of ranks of the host
        nodes = [topology.node_of(number) for number in range(topology.size)]
        self.local_rank = nodes[:rank].count(nodes[rank])
        self.local_size = nodes.count(nodes[rank])
        # True if NCCL carries collectives of tensors on this rank's GPU
        self.by_nccl = False
        # Ranks that have left; this rank's activity, for its watcher; its trials of plans
        self.membership, self.progress, self.trials = Membership(), Progress(), TrialQueue()
        # Facts that must be equal on all ranks, compared when they next exchange objects
        self.comparisons = Comparisons()
        self._scopes, self._open_scope = 0, _OpenScope()
        # Held by the thread of this rank that exchanges objects
        self._gathers = threading.Lock()

    def own_scope(self) -> str:
        """Return a unique name for `scope`.

        **Ranks:** all, in the same order.
        """
        self._scopes += 1
        return f"tfcommx{self._scopes}/"

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Name the collectives inside after `name`, and after no other scope."""
        # Horovod identifies a tensor in a graph by its name. Surrounding scopes may differ between
        # ranks, because Keras numbers its optimizers: an optimizer that only some ranks make would
        # make all ranks wait
        before, self._open_scope.name = self._open_scope.name, name
        try:
            # TensorFlow does not change a name that ends in a slash; it numbers equal names inside
            with tf.name_scope(name):
                yield
        finally:
            self._open_scope.name = before

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

        **Ranks:** all members. **Cost:** sends 2 (p - 1)/p of the buffer.
        **Raises:** PlanError for an unknown shape and for more than 2^31 - 1 entries, as all
        collectives do.
        """
        ranks = self._check(tensor, group)
        # A group of one rank has no process set, and needs no collective
        if len(ranks) == 1:
            return tensor
        if counted:
            self._count(ring_traffic(2 * _sent([tensor], ranks), group, self.topology))
        return self._allreduce(tensor, group, name)

    def allreduce_list(self, tensors: list[tf.Tensor], name: str, average: bool) -> list[tf.Tensor]:
        """Sum or average each tensor over the world, as plain Horovod does.

        Horovod merges the tensors, and averages them, in an internal buffer.

        **Ranks:** all. **Cost:** as one allreduce of them all, without a flat copy.
        """
        for tensor in tensors:
            self._check(tensor, "world")
        ranks = self.members("world")
        if len(ranks) == 1:
            return tensors
        self._count(ring_traffic(2 * _sent(tensors, ranks), "world", self.topology))
        return self._allreduce_list(tensors, name, average)

    def reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Sum over the group; member i receives the i-th of p equal shards.

        **Ranks:** all members. **Cost:** sends (p - 1)/p of the buffer.
        **Raises:** PlanError if the first dimension cannot be cut into p equal shards.
        """
        ranks = self._check_shards("reduce_scatter", tensor, group, name)
        if len(ranks) == 1:
            return tensor
        self._count(ring_traffic(_sent([tensor], ranks), group, self.topology))
        return self._reduce_scatter(tensor, group, name)

    def all_gather(
        self, tensor: tf.Tensor, group: str, name: str, counted: bool = True
    ) -> tf.Tensor:
        """Concatenate the members' tensors, in rank order, on every member; `counted` as traffic.

        **Ranks:** all members. **Cost:** sends p - 1 times the rank's own buffer.
        **Raises:** PlanError if the result has more entries than MPI can count, or a rank's tensor
        more bytes than Horovod can count for NCCL; on every engine, because a plan must fit all.
        """
        ranks = self._check(tensor, group)
        if len(ranks) == 1:
            return tensor
        if (entries := len(ranks) * tensor.shape.num_elements()) > LARGEST_COUNT:
            raise PlanError(
                f"An all-gather brings at most {LARGEST_COUNT} entries together. {name!r} brings "
                f"{entries} from {len(ranks)} ranks. Lower `density`, `bucket_bytes`, or the wire "
                "format's bytes."
            )
        if (sent := _bytes(tensor)) > LARGEST_GATHERED_BYTES:
            raise PlanError(
                f"An all-gather takes at most {LARGEST_GATHERED_BYTES} bytes from a rank. {name!r} "
                f"takes {sent} from rank {self.rank}, {tensor.dtype.name} {tensor.shape}. Lower "
                "`density`, `bucket_bytes`, or the wire format's bytes."
            )
        if counted:
            self._count(ring_traffic((len(ranks) - 1) * _bytes(tensor), group, self.topology))
        return self._all_gather(tensor, group, name)

    def alltoall(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        """Send the i-th of p equal shards to member i; return those for this rank, in rank order.

        **Ranks:** all members. **Cost:** sends (p - 1)/p of the buffer, each shard directly to its
        rank.
        **Raises:** PlanError if the first dimension cannot be cut into p equal shards.
        """
        ranks = self._check_shards("alltoall", tensor, group, name)
        if len(ranks) == 1:
            return tensor
        self._count(alltoall_traffic(_sent([tensor], ranks), group, self.topology))
        return self._alltoall(tensor, group, name)

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, counted: bool = False
    ) -> tf.Tensor:
        """Return the tensor of rank `root` on every rank of the world.

        Args:
            tensor: of equal dtype and shape on all ranks.
            root: the rank whose tensor counts.
            name: equal on all ranks.
            counted: True if it is part of the training steps, and therefore of their traffic.

        **Ranks:** all. **Cost:** every other rank receives it once, as along a chain.
        **Raises:** as `allreduce`.
        """
        if self.topology.size == 1:
            return tensor
        self._check(tensor, "world")
        if counted:
            self._count(broadcast_traffic(_bytes(tensor), self.topology))
        return self._broadcast(tensor, root, name)

    def gather_objects(self, item: T) -> list[T]:
        """Return the items of all ranks, in rank order.

        Args:
            item: plain data, as plain_data.py encodes it; no object of a class.

        **Ranks:** all, outside of traced code. **Raises:** TypeError for other data;
        ConfigurationError, on every rank, if facts that were stated by `comparisons` differ between
        ranks, or ranks are in different functions of this package, as with a callback that only one
        rank has; on this rank, in a second thread.
        """
        if self.topology.size == 1:
            # Encoded, because items that other ranks could not receive must fail here, too
            return [decode(encode(item))]
        caller = sys._getframe(1)
        # Ranks pair exchanges by their order, which two threads may change
        if not self._gathers.acquire(blocking=False):
            raise ConfigurationError(
                "One thread of a rank exchanges at a time. Received "
                f"{source_line(caller)} in {threading.current_thread().name} of rank {self.rank}, "
                "while another thread exchanges. Train one model after the other."
            )
        try:
            own = (item, self.comparisons.digests(), function_of(caller))
            items, digests, functions = zip(*self._gather_objects(own), strict=True)
            # `functions` is equal on all ranks, so all raise, and take part in the exchange of
            # lines
            if len(set(functions)) > 1:
                self._refuse_functions(functions, caller)
            self.comparisons.settle(self.rank, digests, self._gather_objects)
        finally:
            self._gathers.release()
        return list(items)

    def _refuse_functions(self, functions: Sequence[str], caller: FrameType) -> NoReturn:
        """Raise the difference between the exchanges in which the ranks take part."""
        # Ranks would take the objects of another function for theirs
        lines = self._gather_objects(source_line(caller))
        rank = next(rank for rank, name in enumerate(functions) if name != functions[0])
        raise ConfigurationError(
            f"All ranks must take part in the same exchange. Received {lines[0]} on rank 0 and "
            f"{lines[rank]} on rank {rank}. Pass the same callbacks in the same order on every "
            "rank, except those that only write files; end a `fit` on all ranks, such as a trial "
            "that a tuner prunes; broadcast, restore and measure on all ranks or on none."
        )

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent so far, inside its node and to other nodes.

        For collectives it is the mean over the ranks, for messages the bytes of this rank.
        """
        pairs = zip(self._counted(), self.messages.traffic(), strict=True)
        return Traffic(*(collectives + messages for collectives, messages in pairs))

    @abc.abstractmethod
    def _counted(self) -> Traffic:
        """Return the bytes of collectives so far."""

    def _check_shards(
        self, collective: str, tensor: tf.Tensor, group: str, name: str
    ) -> tuple[int, ...]:
        ranks = self._check(tensor, group)
        if len(ranks) > 1 and tensor.shape[0] % len(ranks):
            raise PlanError(
                f"{collective} {name!r} needs a length that {len(ranks)} ranks divide. Received "
                f"{tensor.shape[0]} on rank {self.rank}. Pad the buffer."
            )
        return ranks

    def _check(self, tensor: tf.Tensor, group: str) -> tuple[int, ...]:
        """Refuse tensors that no collective can carry; return the ranks of the group."""
        self.membership.require_all()
        ranks, entries = self.members(group), tensor.shape.num_elements()
        if entries is None and len(ranks) > 1:
            raise PlanError(
                "A collective needs a tensor whose shape is known while tracing: its bytes are "
                f"counted then. Received shape {tensor.shape} on rank {self.rank}. Declare it "
                "with tf.ensure_shape."
            )
        if entries is not None and entries > LARGEST_COUNT:
            raise PlanError(
                f"A collective carries at most {LARGEST_COUNT} entries. Received {entries}. "
                "Lower `bucket_bytes`, or split the variable."
            )
        return ranks

    def make_join_a_barrier(self) -> None:  # noqa: B027 - most libraries have none
        """Let the library's `join()` only wait for all ranks from now on."""

    # Methods that a library must provide. The arguments are checked, the group has more than one
    # rank, and the traffic is counted; results are those of the public methods.

    @abc.abstractmethod
    def _count(self, sent: Traffic) -> None:
        """Add the bytes of one call to the counters, also in traced code."""

    @abc.abstractmethod
    def _gather_objects(self, item: T) -> list[T]: ...

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
    return int(math.prod(tensor.shape) * tensor.dtype.size)


def _sent(tensors: list[tf.Tensor], ranks: tuple[int, ...]) -> float:
    """Count the bytes that a rank sends if it keeps one of p shards of these tensors."""
    return (len(ranks) - 1) / len(ranks) * sum(map(_bytes, tensors))


class WatchedSum:
    """A sum over all ranks, in a separate scope."""

    def __init__(self, comm: Comm, name: str, summed: str) -> None:
        self._comm, self._name = comm, name
        # Set by the first sum, which all ranks compute; one rank alone may make an optimizer
        self._scope = ""
        self._waits = comm.progress.of_exchange([summed], counted=False)

    def __call__(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum over all ranks. **Ranks:** all. **Cost:** one allreduce."""
        number = self._waits.begin([tensor])
        self._scope = self._scope or self._comm.own_scope()
        with self._comm.scope(self._scope):
            total = self._comm.allreduce(tensor, "world", self._name)
        self._waits.end(0, [total], number)
        return total
