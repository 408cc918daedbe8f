"""Horovod's own allreduce: the identity of the routes.

In float16, as with Horovod's `Compression.fp16`, half the bytes are sent, and each addition rounds
to 11 bits, because the engine adds in float16. Each rank's own rounding error stays in its
residual; that of the engine's partial sums is lost. The engines cannot add bfloat16. Routes that
add in float32: `asa`, and `torus` in bfloat16.
"""

from tfcommx import engines
from tfcommx.core import PLAIN, Bucket, Links, Topology, Traffic, cost
from tfcommx.routes.route import Codec, Comm, ListRoute, PeerRoute, Tensor
from tfcommx.wire import formats


class Allreduce(PeerRoute, ListRoute):
    """The engine's own allreduce, on one flat vector or on a list of tensors."""

    name = "allreduce"
    fused = True
    wires = (PLAIN, "float16")

    def run(self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec) -> Tensor:
        """Return the sum of `flat` over all ranks.

        **Ranks:** all. **Cost:** one collective, 2 (p - 1)/p of the vector sent.
        """
        if not bucket.rounds:
            return self.run_in_group(flat, bucket, comm, "world")
        sums = self.written_sums(flat, bucket, comm, codec, "world")
        scale = formats.sum_scale(bucket.wire, comm.topology.size)
        return codec.read_dense(sums, bucket.wire, flat.dtype, scale)

    def written_sums(
        self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec, group: str, own: float = 1.0
    ) -> Tensor:
        """Return the sum of `flat` over a group in float16, made by the engine.

        Args:
            own: scale by which numbers of the magnitude of `flat` fit float16.

        Returns:
            The sum, times `own` and `formats.sum_scale` of the group.

        **Ranks:** all of the group.
        """
        # A power of two, at least p, divides the entries, because sums must not overflow; a finite
        # number beyond 65504 is sent as 65504, and the rest stays in the residual
        scale = own * formats.sum_scale(bucket.wire, len(comm.members(group)))
        written = codec.write_dense(flat, bucket.wire, 0, scale, 1 / own)
        return self.run_in_group(written, bucket, comm, group)

    def run_in_group(self, flat: Tensor, bucket: Bucket, comm: Comm, group: str) -> Tensor:
        return comm.allreduce(flat, group, bucket.name)

    def run_list(
        self, parts: list[Tensor], bucket: Bucket, comm: Comm, average: bool
    ) -> list[Tensor]:
        """Return the sum or average of each tensor over all ranks. **Ranks:** all."""
        # Never slower than plain Horovod, because the engine merges the tensors itself
        return comm.allreduce_list(parts, bucket.name, average)

    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count the bytes that one rank sends in a step, as the mean: a ring leaves a node once."""
        sent = 2 * (topology.size - 1) / topology.size * formats.dense_bytes(bucket)
        return cost.ring_traffic(sent, "world", topology)

    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the engine's price; a ring over all ranks runs at the pace of its slowest link.

        An addition is priced as one of float32, even in float16.
        """
        total, ranks = formats.dense_bytes(bucket), topology.size
        # The engine's price counts additions by the bytes that travel, and in float16 there are as
        # many as in float32
        narrower = (ranks - 1) / ranks * (bucket.padded_bytes - total)
        price = engines.of(links).all_reduce(total, topology, links)
        return price + narrower * links.slowest(topology).gamma_s_per_byte


ROUTE = Allreduce()
