"""Open MPI up to 4.0: an allreduce below 10,000 bytes doubles, and a longer one is a ring.

The ring of more than 1 MB a rank goes in segments, which changes nothing in its price. It is here
for papers of that time; version 4.1 brought the table that `open_mpi` has.

Source: open-mpi/ompi, releases 1.2 to 4.0: coll_tuned_decision_fixed.c
(`ompi_coll_tuned_allreduce_intra_dec_fixed`, "based on MX results from the Grig cluster").
"""

from __future__ import annotations

from tfcommx.engines.base import Engine
from tfcommx.engines.open_mpi import doubling_seconds
from tfcommx.terms import Links, Topology

# An allreduce of fewer bytes is recursive doubling
SHORT_BYTES = 10_000


class OpenMpi1(Engine):
    """Prices of the older decision; everything but an allreduce is a ring."""

    name = "open_mpi_1"

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price recursive doubling of a short vector, and a ring of a long one."""
        if topology.size == 1:
            return 0.0
        if total_bytes < SHORT_BYTES:
            return doubling_seconds(total_bytes, topology.size, self.doubling(topology, links))
        return super().all_reduce(total_bytes, topology, links)


ENGINE = OpenMpi1()
