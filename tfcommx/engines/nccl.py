"""NCCL: ring or double binary tree, in the protocol LL, LL128 or Simple, by its tuning model.

NCCL estimates the time of each pair of algorithm and protocol, and takes the shortest. These are
its estimates, with the given links in place of those that it detects:

    latency   base + hops inside x latency inside + hops between x latency between
    ring      2 (p - 1) hops, 2 (m - 1) of them between nodes; bytes 2 (p - 1) / p
    tree      2 (n - 1) hops inside and 2 log2(m) between; bytes 2, at nine tenths of the rate
    LL        writes 4 bytes of flag with 4 of data, and has half of the latency of Simple
    LL128     120 bytes of data in 128, between NVLinks only

An all-to-all, which Horovod makes of one ncclSend and one ncclRecv for each rank, is one kernel,
after the hosts have exchanged its sizes. Its messages are of the protocol Simple, each over a
separate connection: 8 at once in a channel, and the next 8 of the channel after them. The latencies
are those of the ring, because NCCL has no estimate for it.

A link's alpha is the latency of a short message's hop, which is a hop of the ring in LL; for the
others, the difference to that hop in NCCL's table is added.

Source: NVIDIA/nccl, src/graph/tuning.cc, release 2.7.5 (commit 01afd20): `baseLat`, `hwLat`,
`treeCorrectionFactor`, `ncclTopoTuneModel` and `ncclTopoGetAlgoTime`; release 2.8.4 (911d61f):
`ncclGroupEnd` of src/group.cc, src/collectives/device/sendrecv.h, `ncclTopoPostset` of
src/graph/connect.cc; horovod/common/ops/nccl_operations.cc, `NCCLAlltoall`, release 0.28.1. The
double binary tree is Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009). Where we differ: limits of machines (80 GB/s of a tree, 235 GB/s)
are not counted, and LL128 has none a channel.
"""

import math
from typing import NamedTuple

from tfcommx.core import Links, Topology
from tfcommx.engines import engine
from tfcommx.engines.engine import Engine

PROTOCOLS = ("LL", "LL128", "Simple")


class _Latencies(NamedTuple):
    """Seconds of a hop by protocol."""

    nvlink: tuple[float, float, float]
    pci: tuple[float, float, float]
    network: tuple[float, float, float]
    # Latency of a collective, independent of its hops
    base: tuple[float, float, float]


RING = _Latencies(
    nvlink=(0.47e-6, 1.9e-6, 3.4e-6),
    pci=(1.0e-6, 2.5e-6, 5.7e-6),
    network=(2.7e-6, 4.0e-6, 9.6e-6),
    base=(3.6e-6, 10.0e-6, 8.4e-6),
)
TREE = _Latencies(
    nvlink=(0.52e-6, 1.2e-6, 28e-6),
    pci=(1.0e-6, 1.9e-6, 28e-6),
    network=(5.0e-6, 8.5e-6, 50e-6),
    base=(4.4e-6, 4.4e-6, 0.0),
)
# Share of the rate that is data
RING_RATE = (1 / 4, 0.92, 1.0)
TREE_RATE = (0.9 / 3.8, 0.9 * 0.915, 0.9)
# Share of a tree's rate that is reached at 64 B, 128 B, ... 128 MB, by protocol
TREE_REACHES = (
    (1,) * 4 + (0.9, 0.8) + (0.7,) * 4 + (0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9) + (1,) * 3,
    (1,) * 5 + (0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1),
    (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6) + (0.5,) * 6 + (0.6, 0.6, 0.7, 0.8, 0.9),
)
# Factor on the latency of a flag of LL inside a node, if there are several nodes
LL_BESIDE_NETWORK = 1.8
# Factor on the latency of a ring between nodes that no longer fits the buffers of its hops
PLATEAU, PLATEAU_BYTES_A_RANK = 1.9, 4096
# Concurrent messages of an all-to-all: NCCL_MAX_WORK_ELEMENTS in each of at least two channels
AT_ONCE = 8 * 2


class Nccl(Engine):
    """Prices of the algorithm and protocol that NCCL selects; its rings use all adapters."""

    name = "nccl"
    uses_all_nics = True

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an allreduce: the fastest of ring and tree in all protocols, as NCCL chooses."""
        if topology.size == 1:
            return 0.0
        rings = self._rings(2, total_bytes, topology, links)
        # Added after the choice, because NCCL's estimates, by which it chooses, count no additions
        added = links.inside.gamma_s_per_byte * total_bytes
        return added + min(*rings, *self._trees(total_bytes, topology, links))

    def reduce_scatter(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price a reduce-scatter, for which NCCL always uses a ring."""
        if topology.size == 1:
            return 0.0
        added = links.inside.gamma_s_per_byte * total_bytes
        return added + min(self._rings(1, total_bytes, topology, links))

    def all_gather(self, own_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-gather, for which NCCL always uses a ring."""
        if topology.size == 1:
            return 0.0
        return min(self._rings(1, own_bytes * topology.size, topology, links))

    def all_to_all(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price a group of sends and receives: one kernel, AT_ONCE messages at once, in Simple."""
        if topology.size == 1:
            return 0.0
        simple = PROTOCOLS.index("Simple")
        waits = _inside(RING, simple, topology, links)
        if topology.nodes > 1:
            waits = max(waits, _between(RING, simple, links))
        rounds = math.ceil((topology.size - 1) / AT_ONCE)
        waits = links.slowest(topology).alpha_s + RING.base[simple] + rounds * waits
        return waits + max(self.to_all(total_bytes, topology, links))

    def _rings(
        self, rounds: int, total_bytes: float, topology: Topology, links: Links
    ) -> list[float]:
        """Return the price of a ring with one or two passes, in each protocol."""
        p, m = topology.size, topology.nodes
        between = rounds * (m - 1) if m > 1 else 0
        inside = rounds * (p - 1) - between
        sent = rounds * (p - 1) / p * total_bytes * self.flat_ring(topology, links).beta_s_per_byte
        prices = []
        for protocol in _protocols(links, topology):
            waits = RING.base[protocol]
            waits += inside * _inside(RING, protocol, topology, links)
            waits += between * _between(RING, protocol, links)
            long = total_bytes >= PLATEAU_BYTES_A_RANK * p
            if rounds == 2 and m > 1 and long and PROTOCOLS[protocol] == "Simple":
                waits *= PLATEAU
            prices.append(waits + sent / RING_RATE[protocol])
        return prices

    def _trees(self, total_bytes: float, topology: Topology, links: Links) -> list[float]:
        """Return the price of the double binary tree, a chain in each node, in each protocol."""
        inside = topology.size / topology.nodes - 1
        # Rounded down, as `log2i` in NCCL's model
        levels = int(math.log2(topology.nodes))
        sent = 2 * total_bytes * self.flat_ring(topology, links).beta_s_per_byte
        # Powers of two of 64 bytes, by which NCCL's table of corrections is indexed
        power = int(math.log2(max(total_bytes, 64) / 64))
        prices = []
        for protocol in _protocols(links, topology):
            reached = TREE_REACHES[protocol][power] if power < 22 else 1.0
            waits = TREE.base[protocol]
            waits += 2 * inside * _inside(TREE, protocol, topology, links)
            waits += 2 * levels * _between(TREE, protocol, links)
            prices.append(waits + sent / TREE_RATE[protocol] / reached)
        return prices


def _protocols(links: Links, topology: Topology) -> list[int]:
    """Return positions of the protocols that NCCL allows: LL128 only on NVLinks."""
    fast = engine.get(links.engine.wiring).is_nvlink and topology.nodes == 1
    return [0, 1, 2] if fast else [0, 2]


def _inside(table: _Latencies, protocol: int, topology: Topology, links: Links) -> float:
    is_nvlink = engine.get(links.engine.wiring).is_nvlink
    row, short = (table.nvlink, RING.nvlink) if is_nvlink else (table.pci, RING.pci)
    later = LL_BESIDE_NETWORK if topology.nodes > 1 and protocol == 0 else 1.0
    return links.inside.alpha_s + row[protocol] * later - short[0]


def _between(table: _Latencies, protocol: int, links: Links) -> float:
    return links.between.alpha_s + table.network[protocol] - RING.network[0]


ENGINE = Nccl()
