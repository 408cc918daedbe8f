"""MessageRoute: an allreduce made of messages between two ranks, which a schedule lists."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfcommx.routes import transfers
from tfcommx.routes.base import PeerRoute, Select, Tensor, own_options
from tfcommx.terms import (
    Bucket,
    Links,
    PlanError,
    RouteOptions,
    Scheme,
    Topology,
    Traffic,
    check_name,
)

if TYPE_CHECKING:
    from tfcommx.comm.base import Comm
    from tfcommx.wire.codec import Codec

COLLECTIVES = ("allreduce", "reduce")

Price = Callable[[Bucket, Topology, Links], float]


@dataclass(frozen=True)
class MessageOptions(RouteOptions):
    """The options of routes of messages."""

    # Bytes of a block, >= 8, one entry of the widest dtype; `Links.block_bytes` has the default.
    block_bytes: int
    # What `run` is: an allreduce, or a reduce to rank 0 if that one alone updates the weights.
    collective: str = "allreduce"

    def __post_init__(self) -> None:
        check_name("collective", self.collective, COLLECTIVES)
        if self.block_bytes < 8:
            raise PlanError(f"`block_bytes` must be >= 8. Received {self.block_bytes!r}.")


@dataclass(frozen=True)
class MessageRoute(PeerRoute):
    """A route whose messages a schedule lists."""

    # In the table.
    name: str
    # Which message is sent when, a pure function.
    schedule: transfers.Schedule
    # How a rank carries out its part: `transfers.run_by_round` or `transfers.run_when_ready`.
    run_transfers: transfers.RunTransfers
    # Seconds of an allreduce.
    price: Price

    messages = True
    options_type = MessageOptions

    def options(self, scheme: Scheme, links: Links) -> MessageOptions:
        """Return the scheme's size of a block, or else the one that the links are tuned to."""
        return MessageOptions(scheme.block_bytes or links.block_bytes)

    def run(
        self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec, select: Select | None = None
    ) -> Tensor:
        """Return the sum of `flat` over all ranks, with the same bits on all of them.

        After a "reduce" only rank 0 has the sum.

        **Ranks:** all, with the same bucket.
        """
        return self.run_in_group(flat, bucket, comm, "world")

    def run_in_group(self, flat: Tensor, bucket: Bucket, comm: Comm, group: str) -> Tensor:
        """Return the sum of `flat` over a group. **Ranks:** all of the group."""
        collective = own_options(bucket, MessageOptions).collective
        return self._by_messages(collective, flat, bucket, comm, group)

    def broadcast(self, flat: Tensor, bucket: Bucket, comm: Comm) -> Tensor:
        """Return rank 0's `flat` on every rank, by messages. **Ranks:** all."""
        return self._by_messages("broadcast", flat, bucket, comm, "world")

    def _by_messages(
        self, operation: str, flat: Tensor, bucket: Bucket, comm: Comm, group: str
    ) -> Tensor:
        ranks = comm.members(group)
        if len(ranks) == 1:
            return flat
        tag, block = tag_of(bucket.name), entries_per_block(bucket)
        return comm.messages.run(
            lambda array, point_to_point: transfers.carry_out(
                operation,
                array,
                transfers.Participants(ranks, comm.rank, ranks[0], point_to_point, tag),
                self.schedule,
                self.run_transfers,
                block,
            ),
            flat,
            f"{bucket.name}/{operation}",
        )

    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count the bytes of all messages of a step: what one rank sends, as the mean."""
        collective = own_options(bucket, MessageOptions).collective
        return self._traffic(collective, bucket, topology)

    def broadcast_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count the bytes of all messages of a broadcast: what one rank sends, as the mean."""
        return self._traffic("broadcast", bucket, topology)

    def _traffic(self, operation: str, bucket: Bucket, topology: Topology) -> Traffic:
        inside = between = 0
        for source, target, amount in self._messages(operation, bucket, topology):
            if source == target:
                inside += amount
            else:
                between += amount
        return Traffic(inside / topology.size, between / topology.size)

    def port_bytes(self, bucket: Bucket, topology: Topology) -> float:
        """Count the bytes through the busiest port of a node, in its busier direction."""
        collective = own_options(bucket, MessageOptions).collective
        ports: Counter[tuple[str, int]] = Counter()
        for source, target, amount in self._messages(collective, bucket, topology):
            if source != target:
                ports["out", source] += amount
                ports["in", target] += amount
        return float(max(ports.values(), default=0))

    def _messages(
        self, operation: str, bucket: Bucket, topology: Topology
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

    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price of an allreduce, as the file of the schedule has it."""
        return self.price(bucket, topology, links)


def entries_per_block(bucket: Bucket) -> int:
    """Count the entries of a block, >= 1."""
    return own_options(bucket, MessageOptions).block_bytes // bucket.entry_bytes


def tag_of(name: str) -> int:
    """Return the tag of a collective's messages.

    It is the same on every rank, and in [0, 2**15), which every MPI allows.
    """
    return zlib.crc32(name.encode()) % 2**15
