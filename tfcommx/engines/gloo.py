"""Gloo, as Horovod 0.28 calls it: a ring of segments, and messages to all at once.

An allreduce's vector is cut into one chunk a rank, and each chunk into two segments or more, of 1
MiB at most. While a rank adds one segment, it receives the next one:

    link     | segment 0 | segment 1 | segment 2 | segment 3 |
    addition             | segment 0 | segment 1 | segment 2 | segment 3 |

Gloo's `allreduce` uses its ring at all sizes, and never its bcube and halving-doubling, because
Horovod names no algorithm. `allgatherv` is a ring, and `alltoallv` sends to all ranks before it
waits. Both post receives first in the set-up's Horovod. As released, they send first, and two
ranks' messages go one after the other, which is not priced. `collectives.horovod` adds the shards
of an all-to-all instead of calling Gloo's `reduce_scatter`, because the sums of the latter are
wrong at times.

Source: gloo/allreduce.cc (`ring`), gloo/allgatherv.cc and gloo/alltoallv.cc of pytorch/gloo;
horovod/common/ops/gloo_operations.cc, and collective_operations.h (`PrepareOutputAndParams`) for
the sizes that an all-to-all sends first, release 0.28.1.
"""

import math

from tfcommx.core import Links, Topology
from tfcommx.engines.engine import Engine

# Largest segment: AllreduceOptions' kMaxSegmentSize
SEGMENT_BYTES = 2**20
# Segments that are sent before a rank waits for the first
IN_FLIGHT = 2


class Gloo(Engine):
    """Prices of the algorithms that Horovod's Gloo operations run."""

    name = "gloo"

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price the ring of segments: both of its passes, each with its last segments' wait."""
        ranks = topology.size
        if ranks == 1:
            return 0.0
        hop = self.flat_ring(topology, links)
        each = max(IN_FLIGHT, math.ceil(total_bytes / SEGMENT_BYTES / ranks))
        size, rounds = total_bytes / ranks / each, (ranks - 1) * each
        sent, added = size * hop.beta_s_per_byte, size * hop.gamma_s_per_byte
        # The slowest of link, addition and turn in flight determines a segment's round
        reduces = max(sent, added, (hop.alpha_s + sent + added) / IN_FLIGHT)
        gathers = max(sent, (hop.alpha_s + sent) / IN_FLIGHT)
        return rounds * (reduces + gathers)

    def reduce_scatter(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-to-all, and the sum of the received shards."""
        added = (topology.size - 1) / topology.size * total_bytes * links.inside.gamma_s_per_byte
        return self.all_to_all(total_bytes, topology, links) + added

    def all_to_all(self, total_bytes: float, topology: Topology, links: Links) -> float:
        return self.all_at_once(total_bytes, topology, links)


ENGINE = Gloo()
