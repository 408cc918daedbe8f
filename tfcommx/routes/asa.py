"""Alltoall, local sum, all-gather: entries may travel narrower than they are added.

    rank 0  [a0 a1 a2]                [a0 b0 c0]  A = a0+b0+c0           [A B C]
    rank 1  [b0 b1 b2]   -alltoall->  [a1 b1 c1]  B = a1+b1+c1  -gather-> [A B C]
    rank 2  [c0 c1 c2]                [a2 b2 c2]  C = a2+b2+c2           [A B C]

There is no arithmetic in the collectives. Entries travel in the bucket's wire dtype; sums are made
in float32 (float64 vectors on the plain wire: in float64). A finite number that float16 cannot hold
arrives as the largest that it can: loss scaling looks at gradients before the exchange, and would
not see an Inf that is made in it.

Source: Ma et al., "Theano-MPI: a Theano-based Distributed Training Framework" (2016), section 3.2;
with the wire dtype float16 it is the paper's ASA16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfcommx import cost
from tfcommx.routes.base import Codec, RouteBase, Select, Tensor, slowest_link
from tfcommx.terms import PLAIN, VALUE_DTYPES, Bucket, Links, Topology, Traffic
from tfcommx.wire import formats

if TYPE_CHECKING:
    from tfcommx.comm.base import Comm


class Asa(RouteBase):
    """Each rank adds one of p equal parts of the vector."""

    name = "asa"
    wires = (PLAIN, *VALUE_DTYPES)
    shards = "ranks"

    def run(
        self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec, select: Select | None = None
    ) -> Tensor:
        """Return the sum of `flat` over all ranks, in its own dtype.

        **Ranks:** all; the result has the same bits on all: the owner of a shard, too, uses what it
        sent.
        **Cost:** two collectives.
        """
        ranks, dtype = comm.topology.size, formats.dense_dtype(bucket)
        if ranks == 1:
            return flat
        written = codec.write_dense(flat, dtype)
        mine = comm.alltoall(written, "world", f"{bucket.name}/alltoall")
        total = codec.add_dense(mine, dtype, ranks)
        sums = comm.all_gather(codec.write_dense(total, dtype), "world", f"{bucket.name}/gather")
        return codec.read_dense(sums, dtype, flat.dtype)

    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count what one rank sends: (p - 1)/p straight to the owners, then its shard in a ring."""
        sent = (topology.size - 1) / topology.size * _wire_bytes_of_all(bucket)
        alltoall = cost.alltoall_traffic(sent, "world", topology)
        gather = cost.ring_traffic(sent, "world", topology)
        return Traffic(alltoall.inside + gather.inside, alltoall.between + gather.between)

    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price: p - 1 messages of a shard each, the sum, an all-gather.

        The slots of a node share its link. The paper gives no formula: this is the
        alpha-beta-gamma model's.
        """
        ranks, total, link = (
            topology.size,
            _wire_bytes_of_all(bucket),
            slowest_link(topology, links),
        )
        leaving = cost.alltoall_traffic((ranks - 1) / ranks * total, "world", topology)
        alltoall = (
            leaving.inside * links.inside.beta_s_per_byte
            + leaving.between * topology.slots * links.between.beta_s_per_byte
        )
        wide = formats.entry_bytes(formats.sum_dtype(formats.dense_dtype(bucket)))
        added = (ranks - 1) / ranks * bucket.padded * wide * link.gamma_s_per_byte
        gather = cost.all_gather(total / ranks, ranks, link)
        return (ranks - 1) * link.alpha_s + alltoall + added + gather


def _wire_bytes_of_all(bucket: Bucket) -> int:
    return bucket.padded * formats.entry_bytes(formats.dense_dtype(bucket))


ROUTE = Asa()
