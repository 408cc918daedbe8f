"""What a route is: the Protocol, what most routes share, and what a route is given to work with."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from tfcommx import cost
from tfcommx.terms import (
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
)

if TYPE_CHECKING:
    from tfcommx.comm.base import Comm

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


class Codec(Protocol):
    """Writes entries for the wire and reads them; the module `tfcommx.wire.codec` is one.

    Each function is documented there.
    """

    def encode(self, sparse: Sparse, wire: str) -> Tensor:
        """Write k selected entries as int32 words."""

    def merge(self, buffers: Tensor, k: int, size: int, wire: str, shards: int = 1) -> Tensor:
        """Add the entries of all gathered buffers into a dense float32 vector."""

    def write_dense(
        self, entries: Tensor, dtype: str, start: int = 0, scale: float = 1.0, reach: float = 1.0
    ) -> Tensor:
        """Write a dense vector in the dtype in which it travels."""

    def read_dense(self, written: Tensor, dtype: str, into: Any, scale: float = 1.0) -> Tensor:
        """Read what `write_dense` wrote, into a dtype."""

    def add_dense(self, written: Tensor, dtype: str, parts: int, scale: float = 1.0) -> Tensor:
        """Add equal parts of what `write_dense` wrote, in their order."""


class Route(Protocol):
    """Who sends to whom: takes each rank's flat gradient and returns the sum over all ranks.

    Properties describe the route to the planner; `run` carries it out; the rest are prices, which
    need neither TensorFlow nor a running cluster.
    """

    @property
    def name(self) -> str:
        """The name in the table and in a Scheme."""

    @property
    def sparse(self) -> bool:
        """Does it send selected entries? Otherwise it sends the whole vector."""

    @property
    def levels(self) -> int:
        """1, or 2 if it works on node and peer groups: then all nodes need equally many slots."""

    @property
    def wires(self) -> tuple[str, ...]:
        """Formats that it can write; the first one is its plain form."""

    @property
    def shards(self) -> str:
        """How many equal parts it cuts the flat vector into: "none", "slots" or "ranks"."""

    @property
    def messages(self) -> bool:
        """Is it made of messages between two ranks? These need an MPI launch."""

    @property
    def takes_list(self) -> bool:
        """Can it take the gradients as they are, without a flat copy? Then it is a ListRoute."""

    @property
    def options_type(self) -> type[RouteOptions]:
        """The class of its options."""

    def options(self, scheme: Scheme, links: Links) -> RouteOptions:
        """Return what a bucket must carry for this route.

        Args:
            scheme: what the user asks for.
            links: of the cluster, the same on every rank.
        """

    def cheapest(self, bucket: Bucket, topology: Topology, links: Links) -> Bucket:
        """Return the bucket with the options that cost least: a pure function of the arguments."""

    def needs_messages(self, bucket: Bucket) -> bool:
        """Tell whether this bucket sends messages between two ranks."""

    def shard(self, bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
        """Return start and stop of the part of the flat vector whose residual this rank keeps."""

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

    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count what one rank sends in a step, exactly, as the mean over the ranks."""

    def broadcast_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count what one rank sends in a `broadcast`, as the mean over the ranks."""

    def port_bytes(self, bucket: Bucket, topology: Topology) -> float:
        """Count the bytes of a step through the busiest port of a node, in its busier direction."""

    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price of a step."""

    def stages(self, bucket: Bucket, topology: Topology, links: Links) -> list[Stage]:
        """Split the price by what is busy, in the order in which it is.

        The seconds add up to `seconds`, without what a SELECT of a one-level route takes.
        """


class ListRoute(Route, Protocol):
    """A route that can take the gradients as they are."""

    def run_list(
        self, parts: list[Tensor], bucket: Bucket, comm: Comm, average: bool
    ) -> list[Tensor]:
        """Return the sum or average of each tensor over all ranks. **Ranks:** all."""


class PeerRoute(Route, Protocol):
    """A dense route that also works within one group of ranks, such as the peers of a torus."""

    def run_in_group(self, flat: Tensor, bucket: Bucket, comm: Comm, group: str) -> Tensor:
        """Return the sum of `flat` over a group. **Ranks:** all of the group."""


class RouteBase(abc.ABC):
    """The defaults of a route: one level, dense, no options, rings."""

    sparse: bool = False
    levels: int = 1
    wires: tuple[str, ...] = (PLAIN,)
    shards: str = "none"
    messages: bool = False
    takes_list: bool = False
    options_type: type[RouteOptions] = NoOptions

    def options(self, scheme: Scheme, links: Links) -> RouteOptions:
        """Return no options."""
        return NoOptions()

    def cheapest(self, bucket: Bucket, topology: Topology, links: Links) -> Bucket:
        """Return the bucket as it is: there is one way to go."""
        return bucket

    def needs_messages(self, bucket: Bucket) -> bool:
        """Return whether the route is one of messages."""
        return self.messages

    def shard(self, bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
        """Return the whole vector: every rank keeps its residual of all of it."""
        return 0, bucket.padded

    def broadcast(self, flat: Tensor, bucket: Bucket, comm: Comm) -> Tensor:
        """Return rank 0's `flat` on every rank, by the engine. **Ranks:** all."""
        return comm.broadcast(flat, 0, f"{bucket.name}/weights", counted=True)

    def broadcast_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count what one rank sends if the vector goes from rank to rank along all of them."""
        return cost.broadcast_traffic(bucket.padded_bytes, topology)

    @abc.abstractmethod
    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count what one rank sends in a step; each route has its own."""

    @abc.abstractmethod
    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price of a step; each route has its own."""

    def stages(self, bucket: Bucket, topology: Topology, links: Links) -> list[Stage]:
        """Return one stage at the port of the slowest link, after the selection if it is sparse."""
        port = "between" if topology.nodes > 1 else "inside"
        sent = Stage(port, self.seconds(bucket, topology, links))
        return [Stage(SELECT, 0.0), sent] if self.sparse else [sent]

    def port_bytes(self, bucket: Bucket, topology: Topology) -> float:
        """Count the bytes through a node's port if all nodes are loaded alike.

        So it is with rings and alltoalls; if the nodes have unequal numbers of slots, this is their
        mean.
        """
        return self.wire_bytes(bucket, topology).between * topology.size / topology.nodes


def slowest_link(topology: Topology, links: Links) -> Link:
    """Return the link at whose pace a one-level route runs."""
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
