"""No engine: the prices of papers that give only alpha, beta and gamma.

Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2021), section 3.2: a ring's reduce-scatter and allreduce, and an all-gather with log p
latency terms, as `cost` has them.
"""

from tfcommx.core import Links, Topology, cost
from tfcommx.engines.engine import Engine


class Ring(Engine):
    """The identity of the table: prices of routes without properties of an engine."""

    name = "ring"

    def all_gather(self, own_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-gather as the paper counts it, with log2(p) latency terms."""
        return cost.all_gather(own_bytes, topology.size, self.flat_ring(topology, links))


ENGINE = Ring()
