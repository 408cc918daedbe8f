"""Flat sparse all-gather: every rank selects from its whole gradient and sends to all others.

Source: Renggli et al., "SparCML" (2019); named NaiveAG in Shi et al. (2021), section 5.3, and
priced by its equation 3.
"""

from tfcommx import engines
from tfcommx.core import Bucket, Links, Topology, Traffic, cost
from tfcommx.routes.route import Codec, Comm, Select, SparseRoute, Tensor
from tfcommx.wire import formats


class Allgather(SparseRoute):
    """Every rank selects from, and keeps the residual of, the whole vector."""

    name = "allgather"

    def run(self, flat: Tensor, bucket: Bucket, comm: Comm, codec: Codec, select: Select) -> Tensor:
        """Return the sum over all ranks of their selected entries, as a dense vector.

        **Ranks:** all. **Cost:** one collective.
        """
        words = codec.encode(select(flat), bucket.wire)
        gathered = comm.all_gather(words, "world", bucket.name)
        # All ranks add the same words in the same order, so they get the same bits
        return codec.merge(gathered, bucket.selected, bucket.padded, bucket.wire)

    def wire_bytes(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Count the bytes that one rank sends: its pairs go to p - 1 ranks around the ring."""
        return cost.ring_traffic((topology.size - 1) * _pairs_bytes(bucket), "world", topology)

    def seconds(self, bucket: Bucket, topology: Topology, links: Links) -> float:
        """Return the price, equation 3, for values and indices together.

        The paper counts 4 bytes of each, in two collectives.
        """
        return engines.of(links).all_gather(_pairs_bytes(bucket), topology, links)


def _pairs_bytes(bucket: Bucket) -> int:
    return formats.size_bytes(bucket.selected, bucket.padded, bucket.wire)


ROUTE = Allgather()
