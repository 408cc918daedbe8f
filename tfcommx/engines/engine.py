"""Engine: the prices of its collectives over the ranks of a topology.

A group of ranks is given as a separate topology: the ranks of a node as `Topology(1, slots)`, peers
as `Topology(nodes, 1)` with `shared_port` as the link between.

`WIRINGS` lists the connections of the ranks of a node, and the share that a ring has of them. In a
flat ring each rank of a node sends to the next one while it receives from the previous one, all at
the same time:

    nvlink, pcie_switch    r0 --> r1 --> r2 --> r3     each has a separate output and input
    root_complex           r0 -> [host] -> r1, ...     all messages pass one root complex
    host_memory            r0 -> [memory] -> r1, ...   which writes, then reads, each message
    qpi                    socket 0 <--> socket 1      one message each way crosses

To add a wiring: add a row to `WIRINGS`, and a description to docs/how-to/simulate-and-plan.md.

Source: PCI Express and NVLink are duplex; that a switch forwards between its ports without the root
complex, and that GPUs without peer access use host memory, is in NVIDIA's "GPUDirect RDMA" guide
("Supported Systems") and in NCCL's path types (NVL, PIX, PXB, PHB, SYS).

`Calibrated` is an engine whose collectives were measured: a curve in place of a line.

    seconds |                          . the engine's price from here on
            |                   o
            |            o                    o measured; straight lines between them
            |  o
            +-------------------------- bytes

The time of short allreduces includes costs outside of alpha and an algorithm's number of steps: the
wake-up of threads, an engine's switch of algorithm, a protocol's handshake. A single
all-gather does not reach the rate of a row of them, because its ranks begin at different times.
"""

import abc
import dataclasses
from typing import NamedTuple

import numpy as np

from tfcommx.core import Link, Links, Topology, check_name, cost


class Wiring(NamedTuple):
    """Path of the messages between ranks of one node."""

    # True if the messages of all slots share one path
    is_shared: bool
    # Times that the path carries each byte: 2 if it is written, then read
    passes: int
    # True for NVLink, for which NCCL assumes shorter latencies, and its protocol LL128
    is_nvlink: bool = False


WIRINGS = {
    "nvlink": Wiring(is_shared=False, passes=1, is_nvlink=True),
    "pcie_switch": Wiring(is_shared=False, passes=1),
    "root_complex": Wiring(is_shared=True, passes=1),
    "host_memory": Wiring(is_shared=True, passes=2),
    "qpi": Wiring(is_shared=False, passes=1),
}


def get(name: str) -> Wiring:
    """Return the wiring of a name. **Raises:** ConfigurationError for an unknown one."""
    return WIRINGS[check_name("wiring", name, WIRINGS)]


def ring_link(wire: Link, slots: int, wiring: str) -> Link:
    """Return the link of a rank in a node while all its slots send to their next ranks.

    >>> ring_link(Link(1e-5, 1e-10), 4, "root_complex").beta_s_per_byte
    4e-10

    Args:
        wire: link of a single message. Measured links need no such conversion, because all ranks
            send in the probe.
        slots: ranks of the node, >= 1.
        wiring: a key of `WIRINGS`.

    **Raises:** ConfigurationError for an unknown wiring.
    """
    path = get(wiring)
    streams = slots if path.is_shared else 1
    return Link(wire.alpha_s, wire.beta_s_per_byte * streams * path.passes, wire.gamma_s_per_byte)


class Engine(abc.ABC):
    """Prices of collectives on an idle network; the defaults are rings.

    All prices are seconds of the slowest rank. Bytes are those of the whole vector, or of one
    rank's contribution to an all-gather.
    """

    # Key in the table and in EngineSettings
    name: str
    # True if one ring uses all adapters of a node; otherwise it uses one of them
    uses_all_nics: bool = False

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an allreduce: a ring's reduce-scatter, then its all-gather."""
        return cost.all_reduce(total_bytes, topology.size, self.flat_ring(topology, links))

    def reduce_scatter(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price a reduce-scatter of a vector."""
        return cost.reduce_scatter(total_bytes, topology.size, self.flat_ring(topology, links))

    def all_gather(self, own_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-gather of `own_bytes` from each rank, in p - 1 steps of a ring."""
        hop, steps = self.flat_ring(topology, links), topology.size - 1
        return steps * (hop.alpha_s + own_bytes * hop.beta_s_per_byte)

    def all_to_all(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-to-all in p - 1 rounds: in round d each rank sends to the d-th after it.

        Args:
            total_bytes: bytes of one rank's vector, of which each rank receives 1/p.
            topology: topology of the ranks.
            links: prices of messages; the slots of a node share its port.
        """
        rounds = (topology.size - 1) * links.slowest(topology).alpha_s
        return rounds + sum(self.to_all(total_bytes, topology, links))

    def all_at_once(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-to-all that sends all messages before it waits for the first.

            sizes -alpha-> | message to rank 1 ->
                           | message to rank 2 ->   and so on, at the same time

        The first alpha is a separate all-to-all, in which Horovod exchanges the numbers of bytes.
        The processor's time to send a message is not in the links, and not counted.
        """
        if topology.size == 1:
            return 0.0
        waits = 2 * links.slowest(topology).alpha_s
        return waits + max(self.to_all(total_bytes, topology, links))

    def to_all(self, total_bytes: float, topology: Topology, links: Links) -> tuple[float, float]:
        """Return the seconds for the bytes of an all-to-all, inside nodes and through ports."""
        sent = (topology.size - 1) / topology.size * total_bytes
        leaving = cost.alltoall_traffic(sent, "world", topology)
        port = self.port(links, topology.slots)
        inside = leaving.inside * links.inside.beta_s_per_byte
        return inside, leaving.between * port.beta_s_per_byte

    def port(self, links: Links, streams: int) -> Link:
        """Return the link of one of several equal streams through a node's port.

        Args:
            links: links of the cluster; `between` is the port, with all adapters of the node.
            streams: streams that leave the node at the same time, >= 1.
        """
        used = links.engine.nics if self.uses_all_nics else min(links.engine.nics, streams)
        slower = streams * links.engine.nics / used
        return dataclasses.replace(
            links.between, beta_s_per_byte=slower * links.between.beta_s_per_byte
        )

    def shared_port(self, links: Links, streams: int) -> Links:
        """Return links whose port is the share of one of several streams; for groups of peers."""
        # The stream's share of the port contains that of the adapters
        engine = dataclasses.replace(links.engine, nics=1)
        return links._replace(between=self.port(links, streams), engine=engine)

    def flat_ring(self, topology: Topology, links: Links) -> Link:
        """Return one link equivalent to all hops of a ring in rank order.

            node 0                  node 1
            r0 -inside-> r1 -between-> r2 -inside-> r3 -between-> r0

        The slowest hop determines the rate of bytes, because every hop carries a message in each
        step. Latencies count as their mean, because a rank waits only for the previous one, and a
        chunk passes all hops in turn.
        """
        if topology.nodes == 1:
            return links.inside
        port, ranks = self.port(links, 1), topology.size
        if ranks == topology.nodes:
            return port
        leave = topology.nodes / ranks
        alpha = leave * port.alpha_s + (1 - leave) * links.inside.alpha_s
        beta = max(port.beta_s_per_byte, links.inside.beta_s_per_byte)
        return Link(alpha, beta, port.gamma_s_per_byte)

    def doubling(self, topology: Topology, links: Links) -> list[Link]:
        """Return the links of exchanges at distances 1, 2, 4, ... below the number of ranks.

        The partner at distance d is in the same node if 2 d <= slots. Otherwise all slots of a node
        exchange with other nodes at once.
        """
        count = topology.size.bit_length() - 1
        port = self.port(links, topology.slots)
        inside = [2 << step <= topology.slots for step in range(count)]
        return [links.inside if within else port for within in inside]


class Calibrated(Engine):
    """The prices of an engine, with measured curves for groups of the measured size."""

    def __init__(self, engine: Engine, links: Links) -> None:
        self.name, self.uses_all_nics = engine.name, engine.uses_all_nics
        self._engine, self._calibration = engine, links.calibration
        nodes = self._calibration.nodes
        # (price of an all-gather, measured seconds / price), because a price also contains the
        # share of the port that a group has
        self._stretched = [
            (price, seconds / price)
            for sent, seconds in self._calibration.gathers
            if (price := engine.all_gather(sent / (nodes - 1), Topology(nodes, 1), links))
        ]

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an allreduce by the curve, and beyond its last point by its rate or the engine's.

        The faster of the two counts, because the engine's price comes from all-gathers, and those
        of long messages are slower than an allreduce's segments between two ranks of Gloo.
        """
        price = self._engine.all_reduce
        # The curve is that of all ranks; the ranks of a node, or peers, take other steps
        if topology.size != self._calibration.ranks or not self._calibration.points:
            return price(total_bytes, topology, links)
        sizes = [size for size, _ in self._calibration.points]
        seconds = [second for _, second in self._calibration.points]
        if total_bytes >= sizes[-1]:
            more = price(total_bytes, topology, links) - price(sizes[-1], topology, links)
            return seconds[-1] + min(more, seconds[-1] * (total_bytes / sizes[-1] - 1))
        return float(np.interp(total_bytes, sizes, seconds))

    def reduce_scatter(self, total_bytes: float, topology: Topology, links: Links) -> float:
        return self._engine.reduce_scatter(total_bytes, topology, links)

    def all_gather(self, own_bytes: float, topology: Topology, links: Links) -> float:
        return self._measured(self._engine.all_gather(own_bytes, topology, links), topology)

    def all_to_all(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-to-all like an all-gather of as many bytes, whose time it was close to."""
        return self._measured(self._engine.all_to_all(total_bytes, topology, links), topology)

    def _measured(self, price: float, topology: Topology) -> float:
        """Return a price between the measured nodes as the all-gathers of that price took."""
        if not self._stretched or topology.nodes != self._calibration.nodes:
            return price
        prices, stretched = zip(*self._stretched, strict=True)
        # Beyond the measured lengths `interp` keeps the ratio of the nearest one
        return price * float(np.interp(price, prices, stretched))
