"""Horovod's hierarchical allreduce: NCCL inside the nodes, MPI between them.

    reduce-scatter by NCCL | each slot's part: allreduce by MPI, on the host | all-gather by NCCL

Source: horovod/common/ops/nccl_operations.cc, `NCCLHierarchicalAllreduce`, release 0.28.1;
HOROVOD_HIERARCHICAL_ALLREDUCE switches it on. It needs both NCCL and MPI.
"""

from tfcommx.core import Links, Topology
from tfcommx.engines import open_mpi
from tfcommx.engines.nccl import Nccl


class Hierarchical(Nccl):
    """Prices of an engine with two libraries; NCCL does all but a flat allreduce."""

    name = "horovod_hierarchical"

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price the three steps; the slots of a node share its port in the second."""
        if topology.nodes == 1 or topology.size == topology.nodes or topology.uneven:
            return super().all_reduce(total_bytes, topology, links)
        slots, part = topology.slots, total_bytes / topology.slots
        node, peers = Topology(1, slots), Topology(topology.nodes, 1)
        shared = open_mpi.ENGINE.shared_port(links, slots)
        return (
            self.reduce_scatter(total_bytes, node, links)
            + open_mpi.ENGINE.all_reduce(part, peers, shared)
            + self.all_gather(part, node, links)
        )


ENGINE = Hierarchical()
