"""MessageRoute: an allreduce made of messages between two ranks, by a schedule.

A schedule is a list of transfers between positions 0 .. p - 1, and there are two ways to run it.
Position 0 is the root, and position i the i-th rank after it, cyclically. A transfer sends a part
of the sender's vector, which is added to the receiver's (`add`) or replaces it. Transfers of one
round may run at once.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from tfcommx.core import (
    NOMINAL,
    Bucket,
    Links,
    PlanError,
    RouteOptions,
    Scheme,
    Topology,
    Traffic,
    check_name,
    check_whole,
)
from tfcommx.routes.route import Codec, Comm, PeerRoute, Tensor

if TYPE_CHECKING:
    from tfcommx.collectives.point_to_point import PointToPoint

OPERATIONS = ("broadcast", "reduce", "allreduce")
# Messages under way in each direction: enough to hide the latency, few enough to bound the memory
WINDOW = 8


class Transfer(NamedTuple):
    """One message of a schedule."""

    # Round, >= 0; a schedule lists its transfers with ascending rounds
    round: int
    # Position of the sender
    source: int
    # Position of the receiver
    target: int
    # First entry of the vector that is sent
    start: int
    # One after the last entry; > start
    stop: int
    # True: it is added to the receiver's entries; False: it replaces them
    add: bool


# (operation, positions, entries, entries of a block) -> transfers, rounds ascending. A broadcast is
# from position 0, a reduce to position 0
Schedule = Callable[[str, int, int, int], list[Transfer]]


class Participants(NamedTuple):
    """The ranks of one collective, and this rank's means to send to the others."""

    # All participants, in cyclic order of their positions; the root has position 0
    ranks: Sequence[int]
    # This rank, one of `ranks`
    rank: int
    # The root, one of `ranks`
    root: int
    # Sends and receives
    point_to_point: PointToPoint
    # Tag of the messages, in [0, 2**15); different for collectives that may be under way at once
    tag: int = 0

    @property
    def position(self) -> int:
        """This rank's position."""
        return (self.ranks.index(self.rank) - self.ranks.index(self.root)) % len(self.ranks)

    def start(self, way: str, buffer: np.ndarray[Any, Any], position: int) -> Any:
        """Begin to receive "from" a position, or to send "to" it, and return the request."""
        begin = self.point_to_point.receive if way == "from" else self.point_to_point.send
        rank = self.ranks[(position + self.ranks.index(self.root)) % len(self.ranks)]
        return begin(buffer, rank, self.tag)


# (the transfers of one position, the vector that they change, the participants)
RunTransfers = Callable[[Sequence[Transfer], "np.ndarray[Any, Any]", Participants], None]


def carry_out(
    operation: str,
    array: np.ndarray[Any, Any],
    participants: Participants,
    schedule: Schedule,
    run_transfers: RunTransfers,
    block: int = 16384,
) -> np.ndarray[Any, Any]:
    """Run one broadcast, reduce or allreduce.

    Args:
        operation: one of OPERATIONS.
        array: one-dimensional, of any length, the same length and dtype on every rank; not changed.
        participants: the ranks, the same on each of them except for `rank`.
        schedule: lists the messages by round.
        run_transfers: `run_by_round` or `run_when_ready`.
        block: entries of a block, >= 1.

    Returns:
        "broadcast": the root's vector on all ranks; "reduce": the sum on the root, this rank's own
        vector elsewhere; "allreduce": the sum on all, with the same bits.

    **Ranks:** all participants.
    **Raises:** ConfigurationError for an unknown operation; PlanError for a root that does not take
    part.
    """
    check_name("operation", operation, OPERATIONS)
    ranks, root = participants.ranks, participants.root
    if root not in ranks:
        raise PlanError(
            f"The root of a {operation} must take part. Received root={root}, "
            f"ranks={list(ranks)} (rank {participants.rank})."
        )
    result, position = array.copy(), participants.position
    transfers = own_transfers(schedule, operation, len(ranks), len(array), block, position)
    run_transfers(transfers, result, participants)
    # Positions other than the root hold partial sums in `result`
    return array.copy() if operation == "reduce" and position else result


# Kept, because every step has the same transfers, and a schedule lists those of all positions
@functools.lru_cache(maxsize=256)
def own_transfers(
    schedule: Schedule, operation: str, positions: int, entries: int, block: int, position: int
) -> tuple[Transfer, ...]:
    """Return the transfers of one position, cut into messages of at most a block."""
    # Cut, because two long messages in opposite directions of a link wait for each other in Open
    # MPI's TCP, while short ones use both directions
    return tuple(
        transfer._replace(start=start, stop=min(start + block, transfer.stop))
        for transfer in schedule(operation, positions, entries, block)
        if position in (transfer.source, transfer.target)
        for start in range(transfer.start, transfer.stop, block)
    )


def run_by_round(
    transfers: Sequence[Transfer], vector: np.ndarray[Any, Any], participants: Participants
) -> None:
    """Run the transfers of one position, round after round; within a round it sends and receives.

    Needs a schedule in which no position sends entries in the round in which it receives them.
    """
    for _, transfers_of_round in itertools.groupby(transfers, key=lambda transfer: transfer.round):
        run_when_ready(list(transfers_of_round), vector, participants)


def run_when_ready(
    transfers: Sequence[Transfer], vector: np.ndarray[Any, Any], participants: Participants
) -> None:
    """Run the transfers of one position as soon as their data exist.

    Neither directions nor rounds wait for each other. Needs a schedule that cuts the vector into
    the same blocks for all transfers. **Cost:** one copy of each sent block.
    """
    queues = _Queues(transfers, vector, participants)
    queues.start_ready()
    while queues.finish_one():
        queues.start_ready()


class _UnderWay(NamedTuple):
    request: Any
    transfer: Transfer
    # Must live until the request is done
    buffer: np.ndarray[Any, Any]


class _Queues:
    """The transfers of one position: waiting, under way, and received before their turn.

    The turn of a transfer is the number of earlier transfers that this position receives for the
    same block.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        vector: np.ndarray[Any, Any],
        participants: Participants,
    ) -> None:
        self.vector, self.participants = vector, participants
        self.position = participants.position
        # ("from" or "to", position of the peer) -> transfers not yet under way, in order
        self.waiting: dict[tuple[str, int], deque[Transfer]] = {}
        self.turn: dict[Transfer, int] = {}
        awaited: Counter[int] = Counter()  # Transfers to receive, by the start of their block
        for transfer in transfers:
            is_received = transfer.target == self.position
            line = ("from", transfer.source) if is_received else ("to", transfer.target)
            self.waiting.setdefault(line, deque()).append(transfer)
            self.turn[transfer] = awaited[transfer.start]
            awaited[transfer.start] += is_received
        self.under_way: dict[tuple[str, int], deque[_UnderWay]] = {
            line: deque() for line in self.waiting
        }
        self.applied: Counter[int] = Counter()  # Applied transfers, by the start of their block
        # (start of a block, turn) -> a transfer received before its turn, and its data
        self.early: dict[tuple[int, int], tuple[Transfer, np.ndarray[Any, Any]]] = {}

    def start_ready(self) -> None:
        """Start every transfer whose data exist, up to WINDOW in each direction."""
        for (way, peer), queue in self.waiting.items():
            line = self.under_way[way, peer]
            while queue and len(line) < WINDOW:
                transfer = queue[0]
                # Not the next one in its place, because the receiver awaits blocks in this order
                if way == "to" and self.turn[transfer] > self.applied[transfer.start]:
                    break
                queue.popleft()
                part = self.vector[transfer.start : transfer.stop]
                # A copy is sent, because the vector continues to change meanwhile
                buffer = np.empty_like(part) if way == "from" else part.copy()
                request = self.participants.start(way, buffer, peer)
                line.append(_UnderWay(request, transfer, buffer))

    def finish_one(self) -> bool:
        """Wait for one transfer and apply those whose turn it is; False if none is under way."""
        # The oldest of each line, because messages between two ranks with one tag arrive in order
        fronts = [line for line in self.under_way.values() if line]
        if not fronts:
            return False
        done = self.participants.point_to_point.wait_any([line[0].request for line in fronts])
        _, transfer, buffer = fronts[done].popleft()
        if transfer.target == self.position:
            self.early[transfer.start, self.turn[transfer]] = transfer, buffer
            # In the order of the rounds, because sums must be the same every time
            while ready := self.early.pop((transfer.start, self.applied[transfer.start]), None):
                _apply(*ready, self.vector)
                self.applied[transfer.start] += 1
        return True


def _apply(transfer: Transfer, buffer: np.ndarray[Any, Any], vector: np.ndarray[Any, Any]) -> None:
    part = vector[transfer.start : transfer.stop]
    if transfer.add:
        np.add(part, buffer, out=part)
    else:
        part[...] = buffer


COLLECTIVES = ("allreduce", "reduce")


@dataclass(frozen=True)
class MessageOptions(RouteOptions):
    """The options of routes of messages."""

    # Bytes of a block, >= 8, one entry of the widest dtype; `Links.block_bytes` has the default
    block_bytes: int
    # The collective of `run`: an allreduce, or a reduce if only rank 0 updates the weights
    collective: str = "allreduce"

    def __post_init__(self) -> None:
        check_name("collective", self.collective, COLLECTIVES)
        if self.block_bytes < 8:
            raise PlanError(f"`block_bytes` must be >= 8. Received {self.block_bytes!r}.")


Price = Callable[[Bucket[MessageOptions], Topology, Links], float]


@dataclass(frozen=True)
class MessageRoute(PeerRoute[MessageOptions]):
    """A route whose messages a schedule lists."""

    # Name in the table
    name: str
    # Lists the messages by round; a pure function
    schedule: Schedule
    # Runs a rank's transfers: `run_by_round` or `run_when_ready`
    run_transfers: RunTransfers
    # Returns the seconds of an allreduce, or of a reduce and a broadcast
    price: Price

    messages = True
    options_type = MessageOptions

    def options(self, scheme: Scheme, links: Links) -> MessageOptions:
        """Return the scheme's block size, or else the one that suits the links."""
        return MessageOptions(scheme.block_bytes or links.block_bytes)

    def carry_out(
        self,
        operation: str,
        array: np.ndarray[Any, Any],
        comm: Comm,
        root: int = 0,
        block_bytes: int = NOMINAL.block_bytes,
    ) -> np.ndarray[Any, Any]:
        """Run one broadcast, reduce or allreduce of an array over all ranks, outside of a step.

        >>> from tfcommx import routes
        >>> from tfcommx.collectives.threads import ThreadComm
        >>> def work(comm):
        ...     own = np.array([comm.rank, 1.0])
        ...     return routes.get("pipeline").carry_out("allreduce", own, comm, block_bytes=8)
        >>> [total.tolist() for total in ThreadComm.run(Topology(3, 1), work)]
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]

        Args:
            operation: one of OPERATIONS.
            array: of the same shape and dtype on every rank; not changed.
            comm: this rank's view of the others, such as `tfcommx.collectives.current()`.
            root: the rank whose array is broadcast, or that receives the sum of a reduce.
            block_bytes: bytes of a block, >= 8.

        Returns:
            An array of the same shape: see the function `carry_out`.

        **Ranks:** all, with equal arguments except for the array.
        **Raises:** ConfigurationError without an MPI launch, or for an argument out of range.
        """
        block = max(1, check_whole("block_bytes", block_bytes, least=8) // array.itemsize)
        # None for a single rank, which sends no messages
        point_to_point = cast("PointToPoint", comm.messages.open())
        ranks = comm.members("world")
        participants = Participants(ranks, comm.rank, root, point_to_point, tag_of(self.name))
        result = carry_out(
            operation, np.ravel(array), participants, self.schedule, self.run_transfers, block
        )
        return result.reshape(array.shape)

    def run(self, flat: Tensor, bucket: Bucket[MessageOptions], comm: Comm, codec: Codec) -> Tensor:
        """Return the sum of `flat` over all ranks, with the same bits on all of them.

        After a "reduce" only rank 0 has the sum.

        **Ranks:** all, with the same bucket.
        """
        return self.run_in_group(flat, bucket, comm, "world")

    def run_in_group(
        self, flat: Tensor, bucket: Bucket[MessageOptions], comm: Comm, group: str
    ) -> Tensor:
        return self._by_messages(bucket.options.collective, flat, bucket, comm, group)

    def broadcast(self, flat: Tensor, bucket: Bucket[MessageOptions], comm: Comm) -> Tensor:
        """Return rank 0's `flat` on every rank, by messages. **Ranks:** all."""
        return self._by_messages("broadcast", flat, bucket, comm, "world")

    def _by_messages(
        self, operation: str, flat: Tensor, bucket: Bucket[MessageOptions], comm: Comm, group: str
    ) -> Tensor:
        ranks = comm.members(group)
        if len(ranks) == 1:
            return flat
        tag, block = tag_of(bucket.name), entries_per_block(bucket)
        return comm.messages.run(
            lambda array, point_to_point: carry_out(
                operation,
                array,
                Participants(ranks, comm.rank, ranks[0], point_to_point, tag),
                self.schedule,
                self.run_transfers,
                block,
            ),
            flat,
            f"{bucket.name}/{operation}",
        )

    def wire_bytes(self, bucket: Bucket[MessageOptions], topology: Topology) -> Traffic:
        """Count the bytes of messages that one rank sends in a step, as the mean."""
        return self._traffic(bucket.options.collective, bucket, topology)

    def _traffic(
        self, operation: str, bucket: Bucket[MessageOptions], topology: Topology
    ) -> Traffic:
        inside = between = 0
        for source, target, amount in self._messages(operation, bucket, topology):
            if source == target:
                inside += amount
            else:
                between += amount
        return Traffic(inside / topology.size, between / topology.size)

    def port_bytes(self, bucket: Bucket[MessageOptions], topology: Topology) -> float:
        """Count the bytes through the busiest port of a node, in its busier direction."""
        ports: Counter[tuple[str, int]] = Counter()
        for source, target, amount in self._messages(bucket.options.collective, bucket, topology):
            # Each direction alone, because a port sends and receives at once
            if source != target:
                ports["out", source] += amount
                ports["in", target] += amount
        return float(max(ports.values(), default=0))

    def _messages(
        self, operation: str, bucket: Bucket[MessageOptions], topology: Topology
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (node of the sender, node of the receiver, bytes) of every message."""
        if topology.size == 1:
            return
        block = entries_per_block(bucket)
        for transfer in self.schedule(operation, topology.size, bucket.padded, block):
            yield (
                topology.node_of(transfer.source),
                topology.node_of(transfer.target),
                (transfer.stop - transfer.start) * bucket.entry_bytes,
            )

    def seconds(self, bucket: Bucket[MessageOptions], topology: Topology, links: Links) -> float:
        """Return the price by the formula in the schedule's file.

        That of a reduce includes the broadcast of the weights that follows it.
        """
        return self.price(bucket, topology, links)


def entries_per_block(bucket: Bucket[MessageOptions]) -> int:
    """Count the entries of a block, >= 1."""
    return bucket.options.block_bytes // bucket.entry_bytes


def tag_of(name: str) -> int:
    """Return the tag of a collective's messages.

    It is the same on every rank, and in [0, 2**15), which every MPI allows.
    """
    # Two names that have one tag by chance do no harm, because a rank's messages to another arrive
    # in the order in which their collectives run
    return zlib.crc32(name.encode()) % 2**15
