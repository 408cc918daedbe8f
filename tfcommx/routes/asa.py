"""Alltoall, local sum, all-gather: entries may travel narrower than they are added.

    rank 0  [a0 a1 a2]                [a0 b0 c0]  A = a0+b0+c0           [A B C]
    rank 1  [b0 b1 b2]   -alltoall->  [a1 b1 c1]  B = a1+b1+c1  -gather-> [A B C]
    rank 2  [c0 c1 c2]                [a2 b2 c2]  C = a2+b2+c2           [A B C]

There is no arithmetic in the collectives. Entries travel in the bucket's wire dtype; sums are made
in float32 (float64 vectors on the plain wire: in float64). In 16 bits, and in codes of 8 to 1 bits,
entries are rounded where they leave their rank, and sums where they leave their owner; both keep
the rounding errors. A finite number that float16 cannot hold arrives as the largest that it can,
and the remainder stays: loss scaling checks gradients before the exchange and would not
see an Inf that is made in it.

A rank keeps both errors in one residual, as long as the vector. In the shard that a rank owns, the
owner adds to the sum the parts that it did not write, so its own entries are exact there, and the
rounding error of the sum takes their place. That is one error for the whole cluster, which the next
step adds once, and the residuals of a bucket can be saved, summed and redistributed alike.

The bytes that a rank sends do not grow with the number of ranks, unlike those of selected entries,
which all ranks gather.

Source: Ma et al., "Theano-MPI: a Theano-based Distributed Training Framework" (2016), section 3.2;
with the wire dtype float16 it is the paper's ASA16. That one drops the rounding errors, and loses
.4 (AlexNet) and 1.1 points (GoogLeNet) of top-5 accuracy on 8 GPUs (section 4). With codes,
error feedback on both hops: Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with
Double-Pass Error-Compensated Compression" (2019), algorithm 1, whose server is here the owner.
"""

from tfcommx import engines
from tfcommx.core import (
    DENSE_CODES,
    DENSE_WIRES,
    ENTRY_BYTES,
    PLAIN,
    Bucket,
    Link,
    Links,
    Topology,
    Traffic,
    cost,
)
from tfcommx.routes.route import Codec, Comm, DenseRoute, Tensor
from tfcommx.wire import formats

# Passes over a float32 vector, at the pace of an addition, that codes take besides the sum of the
# parts: a rank reads its gradient and residual and writes codes and the residual; and it reads the
# codes of the sums.
WRITING, READING = 1.5, 1.0


class Asa(DenseRoute):
    """Each rank adds one of p equal parts of the vector."""

    name = "asa"
    wires = (PLAIN, *DENSE_WIRES)
    shards = "ranks"

    def run(self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec) -> Tensor:
        """Return the sum of `flat` over all ranks, in its own dtype.

        **Ranks:** all; the result has the same bits on all: the owner of a shard, too, uses the
        sums as sent.
        **Cost:** two collectives.
        """
        dtype = formats.dense_dtype(bucket)
        sums = self.written_sums(flat, bucket, comm, codec, "world")
        scale = formats.sum_scale(dtype, comm.topology.size)
        return codec.read_dense(sums, dtype, flat.dtype, scale)

    def written_sums(
        self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec, group: str, own: float = 1.0
    ) -> Tensor:
        """Return the sum of `flat` over a group, as it travels: the same bits on all of it.

        Args:
            own: scale by which numbers such as those of `flat` fit the dtype in which they travel.

        Returns:
            The sum, times `own` and `formats.sum_scale` of the group.

        **Ranks:** all of the group.
        """
        dtype, members = formats.dense_dtype(bucket), comm.members(group)
        scale = own * formats.sum_scale(dtype, len(members))
        total = codec.write_dense(flat, dtype, 0, own, 1 / own)
        if len(members) > 1:
            # Not a reduce-scatter, in which the engine would add in the wire's dtype, if it can,
            # and lose the rounding error of each addition
            parts = comm.alltoall(total, group, f"{bucket.name}/alltoall")
            start = members.index(comm.rank) * (flat.shape[0] // len(members))
            total = codec.add_and_write_dense(parts, dtype, len(members), start, own, scale)
        return comm.all_gather(total, group, f"{bucket.name}/gather")

    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count the bytes of one rank: (p - 1)/p to the owners, then its shard in a ring."""
        sent = (topology.size - 1) / topology.size * formats.dense_bytes(bucket, topology.size)
        alltoall = cost.alltoall_traffic(sent, "world", topology)
        gather = cost.ring_traffic(sent, "world", topology)
        return Traffic(alltoall.inside + gather.inside, alltoall.between + gather.between)

    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price: the engine's alltoall and all-gather, and the sum between them.

        Codes are written before and read after. The paper gives no formula.
        """
        ranks, engine = topology.size, engines.of(links)
        total = formats.dense_bytes(bucket, ranks)
        # The owner adds in the wider dtype, whose bytes it reads and writes
        wide = ENTRY_BYTES[formats.sum_dtype(formats.dense_dtype(bucket))]
        link = links.slowest(topology)
        added = (ranks - 1) / ranks * bucket.padded * wide * link.gamma_s_per_byte
        alltoall = engine.all_to_all(total, topology, links)
        coded = code_seconds(bucket, WRITING + READING, link) if ranks > 1 else 0.0
        return alltoall + added + engine.all_gather(total / ranks, topology, links) + coded


def code_seconds(bucket: Bucket, passes: float, link: Link) -> float:
    """Return the time of some passes over a bucket that is written in codes; 0 for another."""
    coded = formats.dense_dtype(bucket) in DENSE_CODES
    return passes * bucket.padded_bytes * link.gamma_s_per_byte if coded else 0.0


ROUTE = Asa()
