"""DenseRoute and SparseRoute: what a route is, and what it is given to work with."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

from tfcommx.core import (
    NARROW,
    PLAIN,
    SPARSE_WIRES,
    Bucket,
    Link,
    Links,
    NoOptions,
    Scheme,
    Sparse,
    Topology,
    Traffic,
    cost,
)
from tfcommx.core.bucket import Options

if TYPE_CHECKING:
    from tfcommx.collectives.comm import Comm
    from tfcommx.wire.codec import Codec

# Of TensorFlow, which this room does not import: prices and plans need none.
Tensor = Any
# A part of the flat gradient -> the entries of it that travel.
Select = Callable[[Tensor], Sparse]

# The resource of a stage that selects; its place is on the rank, its price the simulator's.
SELECT = "select"


class Stage(NamedTuple):
    """A part of a route's price: what is busy, and how long."""

    # A port of the node, "inside" or "between", or SELECT.
    resource: str
    seconds: float


class Route(abc.ABC, Generic[Options]):
    """Describes and prices a route: neither needs TensorFlow or a running cluster.

    `Options` is the class of its options: its buckets carry them. A route derives from DenseRoute
    or SparseRoute, whose `run` carries it out. The defaults are those of one level, made of rings.
    """

    # In the table and in a Scheme
    name: str
    # 2 if it works on node and peer groups: then all nodes need equally many slots
    levels: int = 1
    # Formats that it can write; the first one is its plain form
    wires: tuple[str, ...] = (PLAIN,)
    # How many equal parts it cuts the flat vector into: "none", "slots" or "ranks"
    shards: str = "none"
    # Is it made of messages between two ranks? These need an MPI launch
    messages: bool = False
    # The class of its options
    options_type: type[Options] = cast(Any, NoOptions)

    def options(self, scheme: Scheme, links: Links) -> Options:
        """Return what a bucket must carry for this route; the defaults of its options.

        Args:
            scheme: what the user asks for.
            links: of the cluster, the same on every rank.
        """
        return self.options_type()

    def cheapest(
        self, bucket: Bucket[Options], topology: Topology, links: Links
    ) -> Bucket[Options]:
        """Return the bucket with the options that cost least: a pure function of the arguments."""
        return bucket

    def padding(self, size: int, wire: str, topology: Topology) -> int:
        """Count the zeros that must follow `size` entries so that the route can cut equal shards.

        In 16 or fewer bits peers cut a slot's shard among themselves.
        """
        shards = "ranks" if self.shards == "slots" and wire in NARROW else self.shards
        return -size % {"none": 1, "slots": topology.slots, "ranks": topology.size}[shards]

    def needs_messages(self, bucket: Bucket[Options]) -> bool:
        """Tell whether this bucket sends messages between two ranks."""
        return self.messages

    def shard(self, bucket: Bucket[Options], topology: Topology, rank: int) -> tuple[int, int]:
        """Return start and stop of the part of the flat vector whose residual this rank keeps."""
        return 0, bucket.padded

    def broadcast(self, flat: Tensor, bucket: Bucket[Options], comm: Comm) -> Tensor:
        """Return rank 0's `flat` on every rank: weights travel so. **Ranks:** all."""
        return comm.broadcast(flat, 0, f"{bucket.name}/weights", counted=True)

    @abc.abstractmethod
    def wire_bytes(self, bucket: Bucket[Options], topology: Topology) -> Traffic:
        """Count what one rank sends in a step, exactly, as the mean over the ranks."""

    def broadcast_bytes(self, bucket: Bucket[Options], topology: Topology) -> Traffic:
        """Count what one rank sends in a `broadcast`, as the mean over the ranks."""
        return cost.broadcast_traffic(bucket.padded_bytes, topology)

    def port_bytes(self, bucket: Bucket[Options], topology: Topology) -> float:
        """Count the bytes of a step through the busiest port of a node, in its busier direction.

        With rings and alltoalls all nodes are loaded alike; if they have unequal numbers of slots,
        this is their mean.
        """
        return self.wire_bytes(bucket, topology).between * topology.size / topology.nodes

    @abc.abstractmethod
    def seconds(self, bucket: Bucket[Options], topology: Topology, links: Links) -> float:
        """Return the price of a step."""

    def stages(self, bucket: Bucket[Options], topology: Topology, links: Links) -> list[Stage]:
        """Split the price by what is busy, in the order in which it is.

        The seconds add up to `seconds`, without what a SELECT of a one-level route takes.
        """
        port = "between" if topology.nodes > 1 else "inside"
        return [Stage(port, self.seconds(bucket, topology, links))]


class DenseRoute(Route[Options]):
    """A route that sends whole vectors."""

    @abc.abstractmethod
    def run(self, flat: Tensor, bucket: Bucket[Options], comm: Comm, codec: Codec) -> Tensor:
        """Return the sum of `flat` over all ranks.

        Args:
            flat: float [bucket.padded], in the bucket's dtype.
            bucket: the same on every rank.
            comm: this rank's view of the others.
            codec: writes entries and reads them.

        Returns:
            float [bucket.padded], in the dtype that came, with the same bits on every rank.

        **Ranks:** all.
        """


class SparseRoute(Route[Options]):
    """A route that sends selected entries."""

    wires = SPARSE_WIRES

    @abc.abstractmethod
    def run(
        self, flat: Tensor, bucket: Bucket[Options], comm: Comm, codec: Codec, select: Select
    ) -> Tensor:
        """Return the sum over all ranks of what each selected, as a dense vector.

        Args:
            flat: float32 [bucket.padded].
            bucket: the same on every rank.
            comm: this rank's view of the others.
            codec: writes entries and reads them.
            select: chooses `bucket.k` entries of this rank's shard.

        Returns:
            float32 [bucket.padded], with the same bits on every rank.

        **Ranks:** all.
        """

    def stages(self, bucket: Bucket[Options], topology: Topology, links: Links) -> list[Stage]:
        """Split the price by what is busy: the selection first."""
        return [Stage(SELECT, 0.0), *super().stages(bucket, topology, links)]


class ListRoute(DenseRoute[Options]):
    """A dense route that also takes gradients as they are, without a flat copy."""

    @abc.abstractmethod
    def run_list(
        self, parts: list[Tensor], bucket: Bucket[Options], comm: Comm, average: bool
    ) -> list[Tensor]:
        """Return the sum or average of each tensor over all ranks. **Ranks:** all."""


class PeerRoute(DenseRoute[Options]):
    """A dense route that also works within one group of ranks, such as the peers of a torus."""

    @abc.abstractmethod
    def run_in_group(self, flat: Tensor, bucket: Bucket[Options], comm: Comm, group: str) -> Tensor:
        """Return the sum of `flat` over a group. **Ranks:** all of the group."""


def slot_part(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Return start and stop of the part of the flat vector that belongs to a rank's slot."""
    length = bucket.padded // topology.slots
    start = rank % topology.slots * length
    return start, start + length


def slowest_link(topology: Topology, links: Links) -> Link:
    """Return the link at whose pace messages go that leave nodes if there are several."""
    return links.between if topology.nodes > 1 else links.inside
