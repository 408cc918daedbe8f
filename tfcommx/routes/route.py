"""DenseRoute and SparseRoute: the contracts of routes."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

from tfcommx.core import (
    NARROW,
    PLAIN,
    SPARSE_WIRES,
    Bucket,
    Links,
    NoOptions,
    Scheme,
    Sparse,
    Topology,
    Traffic,
)
from tfcommx.core.bucket import Options

# This package does not import TensorFlow, because prices and plans need none
if TYPE_CHECKING:
    from tfcommx.collectives.comm import Comm as Comm
    from tfcommx.wire.codec import Codec as Codec
else:
    Comm = Codec = object
# A TensorFlow tensor
Tensor = Any
# A part of the flat gradient -> its selected entries, which are sent
Select = Callable[[Tensor], Sparse]

# Resource of a stage that selects: the rank's processor, priced by the simulator
SELECT = "select"


class Stage(NamedTuple):
    """A part of a route's price: the busy resource, and its seconds."""

    # A port of the node, "inside" or "between", or SELECT
    resource: str
    seconds: float


class Route(abc.ABC, Generic[Options]):
    """Describes and prices a route, without TensorFlow or a running cluster.

    `Options` is the class of its options, which its buckets carry. A route derives from DenseRoute
    or SparseRoute, whose `run` executes it. The defaults suit a route of one level made of rings.
    """

    # Name in the table and in a Scheme
    name: str
    # 2 if it works on node and peer groups, for which all nodes need equally many slots
    levels: int = 1
    # Formats that it can write; the first one is its plain form
    wires: tuple[str, ...] = (PLAIN,)
    # Number of equal parts into which it cuts the flat vector: "none" (one), "slots" or "ranks"
    shards: str = "none"
    # True if it consists of messages between two ranks, which need an MPI launch
    messages: bool = False
    # True if Horovod carries out its waiting buckets as one collective: tensor fusion
    fused: bool = False
    # The class of its options
    options_type: type[Options] = cast(Any, NoOptions)

    def options(self, scheme: Scheme, links: Links) -> Options:
        """Return the options of a bucket on this route; here their defaults.

        Args:
            scheme: the user's scheme.
            links: of the cluster, the same on every rank.
        """
        return self.options_type()

    def cheapest(
        self, bucket: Bucket[Options], topology: Topology, links: Links
    ) -> Bucket[Options]:
        """Return the bucket with the cheapest options: a pure function of the arguments."""
        return bucket

    def padding(self, size: int, wire: str, topology: Topology) -> int:
        """Count the zeros that must follow `size` entries, so that equal shards can be cut."""
        # Equal, because collectives of unequal parts are slow on NCCL. In fewer bits the number of
        # ranks counts, because peers also cut a slot's shard
        shards = "ranks" if self.shards == "slots" and wire in NARROW else self.shards
        return -size % {"none": 1, "slots": topology.slots, "ranks": topology.size}[shards]

    def needs_messages(self, bucket: Bucket[Options]) -> bool:
        """Return True if this bucket sends messages between two ranks."""
        return self.messages

    def shard(self, bucket: Bucket[Options], topology: Topology, rank: int) -> tuple[int, int]:
        """Return start and stop of the part of the flat vector whose residual this rank keeps."""
        return 0, bucket.padded

    def broadcast(self, flat: Tensor, bucket: Bucket[Options], comm: Comm) -> Tensor:
        """Return rank 0's `flat`, such as weights, on every rank. **Ranks:** all."""
        return comm.broadcast(flat, 0, f"{bucket.name}/weights", counted=True)

    @abc.abstractmethod
    def wire_bytes(self, bucket: Bucket[Options], topology: Topology) -> Traffic:
        """Count the bytes that one rank sends in a step, exactly, as the mean over the ranks."""

    def port_bytes(self, bucket: Bucket[Options], topology: Topology) -> float:
        """Count the bytes of a step through the busiest port of a node, in its busier direction."""
        # The mean over the nodes, because rings and alltoalls load all nodes alike if these have
        # equally many slots
        return self.wire_bytes(bucket, topology).between * topology.size / topology.nodes

    @abc.abstractmethod
    def seconds(self, bucket: Bucket[Options], topology: Topology, links: Links) -> float:
        """Return the price of a step."""

    def stages(self, bucket: Bucket[Options], topology: Topology, links: Links) -> list[Stage]:
        """Split the price by the busy resource, in the order of use.

        The seconds add up to `seconds`, in which the selection of a one-level route counts as 0.
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
            float [bucket.padded], in the dtype of `flat`, with the same bits on every rank.

        **Ranks:** all.
        """


class SparseRoute(Route[Options]):
    """A route that sends selected entries."""

    wires = SPARSE_WIRES

    @abc.abstractmethod
    def run(
        self, flat: Tensor, bucket: Bucket[Options], comm: Comm, codec: Codec, select: Select
    ) -> Tensor:
        """Return the sum over all ranks of their selected entries, as a dense vector.

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
        """Split the price by the busy resource, with the selection first."""
        return [Stage(SELECT, 0.0), *super().stages(bucket, topology, links)]


class ListRoute(DenseRoute[Options]):
    """A dense route that also takes a list of gradients, without a flat copy."""

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
