"""Engine: the prices of its collectives over the ranks of a topology.

A group of ranks is given as a topology of its own: the ranks of a node as `Topology(1, slots)`,
peers as `Topology(nodes, 1)` with `shared_port` as the link between.

`WIRINGS` says what joins the ranks of a node, and what a ring gets of it. In a flat ring each rank
of a node sends to the next one while it receives from the one before, all at the same time:

    nvlink, pcie_switch    r0 --> r1 --> r2 --> r3     each has a way out and a way in of its own
    root_complex           r0 -> [host] -> r1, ...     all go through one root complex
    host_memory            r0 -> [memory] -> r1, ...   which writes, then reads, what each sends
    qpi                    socket 0 <--> socket 1      one message each way crosses

To add a wiring: add a row to `WIRINGS`, with what it is in words; docs/how-to/simulate-and-plan.md
lists them.

Source: PCI Express and NVLink are duplex; that a switch forwards between its ports without the root
complex, and that GPUs without peer access go through host memory, is in NVIDIA's "GPUDirect RDMA"
guide ("Supported Systems") and in NCCL's path types (NVL, PIX, PXB, PHB, SYS).

`Calibrated` is an engine whose allreduce of all ranks was measured: a curve for short vectors, and
not a line.

    seconds |                          . the engine's price from here on
            |                   o
            |            o                    o measured; straight lines between them
            |  o
            +-------------------------- bytes

Short allreduces take what neither alpha nor an algorithm's number of steps tells: the wake-up of
threads, an engine's switch of algorithm, a protocol's hand-shake.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
from typing import NamedTuple

from tfcommx.core import Calibration, Link, Links, Topology, check_name, cost


class Wiring(NamedTuple):
    """How messages between ranks of one node share their way."""

    # Whether the messages of all slots go through one place
    is_shared: bool
    # How often that place carries each byte: 2 if it is written there, and read from there
    passes: int
    # Whether it is as fast as NVLink: NCCL assumes shorter latencies, and its protocol LL128
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
    """Return what a rank has of a node's wires while all its slots send to their next ones.

    >>> ring_link(Link(1e-5, 1e-10), 4, "root_complex").beta_s_per_byte
    4e-10

    Args:
        wire: of one message that is alone there; measured links need no call of this, because the
            probe lets all ranks send.
        slots: ranks of the node, >= 1.
        wiring: in `WIRINGS`.

    **Raises:** ConfigurationError for an unknown wiring.
    """
    found = get(wiring)
    streams = slots if found.is_shared else 1
    return Link(wire.alpha_s, wire.beta_s_per_byte * streams * found.passes, wire.gamma_s_per_byte)


class Engine(abc.ABC):
    """Prices of collectives on an idle network; what is not overridden is a ring.

    All seconds are those of the slowest rank. Bytes are those of the whole vector, or of what one
    rank gives to an all-gather.
    """

    # In the table and in EngineSettings
    name: str
    # Whether one ring spreads over all adapters of a node; otherwise it uses one of them
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
            total_bytes: of one rank's vector, of which each rank gets 1/p.
            topology: of the ranks.
            links: what messages cost; the slots of a node share its port.
        """
        rounds = (topology.size - 1) * self.farthest(topology, links).alpha_s
        return rounds + sum(self.to_all(total_bytes, topology, links))

    def all_at_once(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-to-all whose messages are all sent before the first is waited for.

            sizes -alpha-> | message to rank 1 ->
                           | message to rank 2 ->   and so on, at the same time

        Horovod tells each rank first, in an all-to-all of its own, how many bytes will come. What
        a processor needs to send a message is not in the links, and not counted.
        """
        if topology.size == 1:
            return 0.0
        waits = 2 * self.farthest(topology, links).alpha_s
        return waits + max(self.to_all(total_bytes, topology, links))

    def to_all(self, total_bytes: float, topology: Topology, links: Links) -> tuple[float, float]:
        """Return seconds of the bytes of an all-to-all, inside nodes and through their ports."""
        sent = (topology.size - 1) / topology.size * total_bytes
        leaving = cost.alltoall_traffic(sent, "world", topology)
        port = self.port(links, topology.slots)
        inside = leaving.inside * links.inside.beta_s_per_byte
        return inside, leaving.between * port.beta_s_per_byte

    def farthest(self, topology: Topology, links: Links) -> Link:
        """Return the link of messages that leave nodes, if there are several."""
        return links.between if topology.nodes > 1 else links.inside

    def port(self, links: Links, streams: int) -> Link:
        """Return what one of some equal streams through a node's port sees of it.

        Args:
            links: `between` is the port, with all adapters of the node.
            streams: that leave the node at the same time, >= 1.
        """
        used = links.engine.nics if self.uses_all_nics else min(links.engine.nics, streams)
        slower = streams * links.engine.nics / used
        return dataclasses.replace(
            links.between, beta_s_per_byte=slower * links.between.beta_s_per_byte
        )

    def shared_port(self, links: Links, streams: int) -> Links:
        """Return links whose port is what one of some streams has; for groups of peers."""
        engine = dataclasses.replace(links.engine, nics=1)
        return links._replace(between=self.port(links, streams), engine=engine)

    def flat_ring(self, topology: Topology, links: Links) -> Link:
        """Return one link that stands for all hops of a ring in rank order.

            node 0                  node 1
            r0 -inside-> r1 -between-> r2 -inside-> r3 -between-> r0

        In each of its steps every hop carries a message, so bytes go at the pace of the slowest
        hop, wherever it is. A rank waits for the one before it only: latencies add up along the
        way of a chunk, which meets the hops in turn, so they count as their mean.
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
    """The prices of an engine, with an allreduce of as many ranks as were measured by the curve."""

    def __init__(self, engine: Engine, calibration: Calibration) -> None:
        self.name, self.uses_all_nics = engine.name, engine.uses_all_nics
        self._engine, self._calibration = engine, calibration

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an allreduce by the curve, and beyond its last point by the engine from there."""
        price = self._engine.all_reduce
        if topology.size != self._calibration.ranks:
            return price(total_bytes, topology, links)
        sizes = [size for size, _ in self._calibration.points]
        seconds = [second for _, second in self._calibration.points]
        if total_bytes >= sizes[-1]:
            known = price(sizes[-1], topology, links)
            return seconds[-1] + price(total_bytes, topology, links) - known
        if total_bytes <= sizes[0]:
            return seconds[0]
        place = bisect.bisect(sizes, total_bytes)
        share = (total_bytes - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    def reduce_scatter(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price a reduce-scatter as the engine does."""
        return self._engine.reduce_scatter(total_bytes, topology, links)

    def all_gather(self, own_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-gather as the engine does."""
        return self._engine.all_gather(own_bytes, topology, links)

    def all_to_all(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-to-all as the engine does."""
        return self._engine.all_to_all(total_bytes, topology, links)
