"""What a route is, and what it is given to work with."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tfcommx.core import (
    NARROW,
    PLAIN,
    Bucket,
    Link,
    Links,
    NoOptions,
    PlanError,
    RouteOptions,
    Scheme,
    Sparse,
    Topology,
    Traffic,
    cost,
)

if TYPE_CHECKING:
    from tfcommx.collectives.comm import Comm
    from tfcommx.wire.codec import Codec

# Of TensorFlow, which this room does not import: prices and plans need none.
Tensor = Any
# A part of the flat gradient -> the entries of it that travel.
Select = Callable[[Tensor], Sparse]

OwnOptions = TypeVar("OwnOptions", bound=RouteOptions)


# The resource of a stage that selects; its place is on the rank, its price the simulator's.
SELECT = "select"


class Stage(NamedTuple):
    """A part of a route's price: what is busy, and how long."""

    # A port of the node, "inside" or "between", or SELECT.
    resource: str
    seconds: float


class Route(abc.ABC):
    """Who sends to whom: takes each rank's flat gradient and returns the sum over all ranks.

    `run` carries the route out; the rest describes and prices it, and needs neither TensorFlow nor
    a running cluster. The defaults are those of a dense route of one level, made of rings.
    """

    # In the table and in a Scheme
    name: str
    # Does it send selected entries? Otherwise it sends the whole vector
    sparse: bool = False
    # 2 if it works on node and peer groups: then all nodes need equally many slots
    levels: int = 1
    # Formats that it can write; the first one is its plain form
    wires: tuple[str, ...] = (PLAIN,)
    # How many equal parts it cuts the flat vector into: "none", "slots" or "ranks"
    shards: str = "none"
    # Is it made of messages between two ranks? These need an MPI launch
    messages: bool = False
    # Can it take the gradients as they are, without a flat copy? Then it has `run_list`
    takes_list: bool = False
    # The class of its options
    options_type: type[RouteOptions] = NoOptions

    def options(self, scheme: Scheme, links: Links) -> RouteOptions:
        """Return what a bucket must carry for this route.

        Args:
            scheme: what the user asks for.
            links: of the cluster, the same on every rank.
        """
        return NoOptions()

    def cheapest(self, bucket: Bucket, topology: Topology, links: Links) -> Bucket:
        """Return the bucket with the options that cost least: a pure function of the arguments."""
        return bucket

    def padding(self, size: int, wire: str, topology: Topology) -> int:
        """Count the zeros that must follow `size` entries so that the route can cut equal shards.

        In 16 bits peers cut a slot's shard among themselves.
        """
        shards = "ranks" if self.shards == "slots" and wire in NARROW else self.shards
        return -size % {"none": 1, "slots": topology.slots, "ranks": topology.size}[shards]

    def needs_messages(self, bucket: Bucket) -> bool:
        """Tell whether this bucket sends messages between two ranks."""
        return self.messages

    def shard(self, bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
        """Return start and stop of the part of the flat vector whose residual this rank keeps."""
        return 0, bucket.padded

    @abc.abstractmethod
    def run(
        self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec, select: Select | None = None
    ) -> Tensor:
        """Return the sum of `flat` over all ranks.

        Args:
            flat: float [bucket.padded], in the bucket's dtype.
            bucket: the same on every rank.
            comm: this rank's view of the others.
            codec: writes entries and reads them.
            select: chooses `bucket.k` entries of this rank's shard; None on dense routes.

        Returns:
            float [bucket.padded], in the dtype that came, with the same bits on every rank.

        **Ranks:** all.
        """

    def broadcast(self, flat: Tensor, bucket: Bucket, comm: Comm) -> Tensor:
        """Return rank 0's `flat` on every rank: weights travel so. **Ranks:** all."""
        return comm.broadcast(flat, 0, f"{bucket.name}/weights", counted=True)

    @abc.abstractmethod
    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count what one rank sends in a step, exactly, as the mean over the ranks."""

    def broadcast_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count what one rank sends in a `broadcast`, as the mean over the ranks."""
        return cost.broadcast_traffic(bucket.padded_bytes, topology)

    def port_bytes(self, bucket: Bucket, topology: Topology) -> float:
        """Count the bytes of a step through the busiest port of a node, in its busier direction.

        With rings and alltoalls all nodes are loaded alike; if they have unequal numbers of slots,
        this is their mean.
        """
        return self.wire_bytes(bucket, topology).between * topology.size / topology.nodes

    @abc.abstractmethod
    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price of a step."""

    def stages(self, bucket: Bucket, topology: Topology, links: Links) -> list[Stage]:
        """Split the price by what is busy, in the order in which it is.

        The seconds add up to `seconds`, without what a SELECT of a one-level route takes.
        """
        port = "between" if topology.nodes > 1 else "inside"
        sent = Stage(port, self.seconds(bucket, topology, links))
        return [Stage(SELECT, 0.0), sent] if self.sparse else [sent]


class PeerRoute(Route):
    """A dense route that also works within one group of ranks, such as the peers of a torus."""

    @abc.abstractmethod
    def run_in_group(self, flat: Tensor, bucket: Bucket, comm: Comm, group: str) -> Tensor:
        """Return the sum of `flat` over a group. **Ranks:** all of the group."""


def slot_part(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Return start and stop of the part of the flat vector that belongs to a rank's slot."""
    length = bucket.padded // topology.slots
    start = rank % topology.slots * length
    return start, start + length


def slowest_link(topology: Topology, links: Links) -> Link:
    """Return the link at whose pace messages go that leave nodes if there are several."""
    return links.between if topology.nodes > 1 else links.inside


def needed(select: Select | None, bucket: Bucket) -> Select:
    """Return the selection that a sparse route cannot do without.

    **Raises:** ValueError if there is none.
    """
    if select is None:
        raise ValueError(
            f"The sparse route {bucket.route!r} needs a selection. Received None for "
            f"{bucket.name!r}."
        )
    return select


def own_options(bucket: Bucket, kind: type[OwnOptions]) -> OwnOptions:
    """Return the bucket's options as the route's own class.

    **Raises:** PlanError if the bucket carries those of another route.
    """
    if not isinstance(bucket.options, kind):
        raise PlanError(
            f"A bucket on the route {bucket.route!r} needs options of the class "
            f"{kind.__name__}. Received {bucket.options!r} in {bucket.name!r}. Make them with "
            "the route's `options`."
        )
    return bucket.options
