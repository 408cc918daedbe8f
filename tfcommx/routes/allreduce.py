"""Horovod's own allreduce: the identity of the routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfcommx import cost
from tfcommx.routes.base import Codec, RouteBase, Select, Tensor, slowest_link
from tfcommx.terms import Bucket, Links, Topology, Traffic

if TYPE_CHECKING:
    from tfcommx.comm.base import Comm


class Allreduce(RouteBase):
    """The engine's own allreduce, on one flat vector or on a list of tensors."""

    name = "allreduce"
    takes_list = True

    def run(
        self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec, select: Select | None = None
    ) -> Tensor:
        """Return the sum of `flat` over all ranks.

        **Ranks:** all. **Cost:** one collective, 2 (p - 1)/p of the vector sent.
        """
        return self.run_in_group(flat, bucket, comm, "world")

    def run_in_group(self, flat: Tensor, bucket: Bucket, comm: Comm, group: str) -> Tensor:
        """Return the sum of `flat` over a group. **Ranks:** all of the group."""
        return comm.allreduce(flat, group, bucket.name)

    def run_list(
        self, parts: list[Tensor], bucket: Bucket, comm: Comm, average: bool
    ) -> list[Tensor]:
        """Return the sum or average of each tensor over all ranks.

        The engine merges them itself, so this is never slower than plain Horovod. **Ranks:** all.
        """
        return comm.allreduce_list(parts, bucket.name, average)

    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count what one rank sends in a step, as the mean: a ring leaves each node once."""
        sent = 2 * (topology.size - 1) / topology.size * bucket.padded * bucket.entry_bytes
        return cost.ring_traffic(sent, "world", topology)

    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price: a ring over all ranks runs at the pace of its slowest link."""
        return cost.all_reduce(bucket.padded_bytes, topology.size, slowest_link(topology, links))


ROUTE = Allreduce()
