"""2D-torus allreduce: reduce-scatter in the node, allreduce among peers, all-gather in the node.

Between nodes each rank moves only its shard, so all slots of a node share the node's traffic. The
allreduce among peers is the engine's own, or one of the routes of messages (`Scheme.peer_route`).

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash" (2018),
section 3.2; named 2DTAR in Shi et al., "Towards Scalable Distributed Training of Deep Learning on
Public Cloud Clusters" (2021), section 5.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfcommx import engines
from tfcommx.core import (
    NARROW,
    PLAIN,
    Bucket,
    Links,
    NoOptions,
    RouteOptions,
    Scheme,
    Topology,
    Traffic,
    check_name,
)
from tfcommx.routes import allreduce, asa, bidirectional, pipeline, tree
from tfcommx.routes.route import Codec, Comm, DenseRoute, PeerRoute, Stage, Tensor, slot_part
from tfcommx.wire import formats

_PEERS: tuple[PeerRoute, ...] = (allreduce.ROUTE, pipeline.ROUTE, tree.ROUTE, bidirectional.ROUTE)
# Routes that can sum among peers, by name.
PEER_ROUTES: dict[str, PeerRoute] = {route.name: route for route in _PEERS}


@dataclass(frozen=True)
class TorusOptions(RouteOptions):
    """The options of the torus."""

    # Route among peers; a name of PEER_ROUTES.
    peer_route: str = "allreduce"
    # Options of that route.
    peers: RouteOptions = field(default_factory=NoOptions)

    def __post_init__(self) -> None:
        check_name("peer route", self.peer_route, PEER_ROUTES)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> TorusOptions:
        """Make the options from their `dataclasses.asdict`."""
        peers = PEER_ROUTES[check_name("peer route", found["peer_route"], PEER_ROUTES)]
        return cls(peers.name, peers.options_type.from_dict(found["peers"]))


class Torus(DenseRoute[TorusOptions]):
    """Two levels: the node, and the peers of each slot."""

    name = "torus"
    levels = 2
    wires = (PLAIN, *NARROW)
    shards = "slots"
    options_type = TorusOptions

    def options(self, scheme: Scheme, links: Links) -> TorusOptions:
        """Return the scheme's route among peers, with its options."""
        peers = PEER_ROUTES[check_name("peer route", scheme.peer_route, PEER_ROUTES)]
        return TorusOptions(peers.name, peers.options(scheme, links))

    def shard(self, bucket: Bucket[TorusOptions], topology: Topology, rank: int) -> tuple[int, int]:
        """Return the part of the rank's slot in fewer bits; otherwise the whole vector."""
        return slot_part(bucket, topology, rank) if bucket.rounds else (0, bucket.padded)

    def needs_messages(self, bucket: Bucket[TorusOptions]) -> bool:
        """Return True if the route among peers is made of messages."""
        return _among_peers(bucket).messages

    def run(self, flat: Tensor, bucket: Bucket[TorusOptions], comm: Comm, codec: Codec) -> Tensor:
        """Return the sum of `flat` over all ranks.

        **Ranks:** all. **Cost:** three collectives; in bfloat16 and in codes four.
        """
        peers, topology = _of_peers(bucket, comm.topology)[0], comm.topology
        part = comm.reduce_scatter(flat, "node", f"{bucket.name}/scatter")
        # The node's sums are made in float32, because its links are fast; each slot rounds its
        # shard of them and keeps the rounding error. Among peers fewer bytes travel, and to the
        # other slots of the node, too
        if bucket.rounds:
            # The entries of `part` are sums over the node already, so float16 needs one scale for
            # its slots and another for the nodes
            node_scale = formats.sum_scale(bucket.wire, topology.slots)
            sums = _adds_narrow(bucket).written_sums(part, bucket, comm, codec, "peers", node_scale)
            sums = comm.all_gather(sums, "node", f"{bucket.name}/sums")
            scale = node_scale * formats.sum_scale(bucket.wire, topology.nodes)
            return codec.read_dense(sums, bucket.wire, flat.dtype, scale)
        part = _peer_route(bucket).run_in_group(part, peers, comm, "peers")
        return comm.all_gather(part, "node", f"{bucket.name}/gather")

    def wire_bytes(self, bucket: Bucket[TorusOptions], topology: Topology) -> Traffic:
        """Count the bytes of one rank: 2 (n - 1)/n of the vector in its node, its shard by peers.

        In fewer bits less of the latter, and of the all-gather in the node.
        """
        n = topology.slots
        peers = _among_peers(bucket).wire_bytes(*_of_peers(bucket, topology))
        inside = (n - 1) / n * (bucket.padded_bytes + formats.dense_bytes(bucket, topology.size))
        return Traffic(inside, peers.between)

    def port_bytes(self, bucket: Bucket[TorusOptions], topology: Topology) -> float:
        """Count the bytes through the busiest port of a node: the shards of all its slots."""
        return topology.slots * _among_peers(bucket).port_bytes(*_of_peers(bucket, topology))

    def seconds(self, bucket: Bucket[TorusOptions], topology: Topology, links: Links) -> float:
        """Return the price: the three steps follow each other.

        The n slots of a node share its link to the others.
        """
        return sum(stage.seconds for stage in self.stages(bucket, topology, links))

    def stages(self, bucket: Bucket[TorusOptions], topology: Topology, links: Links) -> list[Stage]:
        """Split the price: reduce-scatter inside, the peers between, all-gather inside.

        Codes of the sums are read in the end: those of the own shard count among the peers.
        """
        n, engine, node = topology.slots, engines.of(links), Topology(1, topology.slots)
        part, peers = _of_peers(bucket, topology)
        gathered = formats.dense_bytes(bucket, topology.size) / n
        summed = _among_peers(bucket).seconds(part, peers, engine.shared_port(links, n))
        read = asa.code_seconds(bucket, (n - 1) / n * asa.READING, links.inside)
        return [
            Stage("inside", engine.reduce_scatter(bucket.padded_bytes, node, links)),
            Stage("between", summed),
            Stage("inside", engine.all_gather(gathered, node, links) + read),
        ]


def _among_peers(bucket: Bucket[TorusOptions]) -> DenseRoute:
    """Return the route whose prices are those of the exchange among peers."""
    return _adds_narrow(bucket) if bucket.rounds else _peer_route(bucket)


def _adds_narrow(bucket: Bucket[TorusOptions]) -> allreduce.Allreduce | asa.Asa:
    """Return the route that sums fewer bits among peers: the engine's, if it can add them."""
    # The engine adds float16, although it rounds each addition: under Gloo an alltoall reaches two
    # thirds of a port's rate, which cost a fifth of the step at 200 Mbit/s. No engine adds bfloat16
    # or codes: `asa` adds them in float32 and keeps all that it rounds. One peer to a node: both
    # send as much
    return allreduce.ROUTE if bucket.wire in allreduce.ROUTE.wires else asa.ROUTE


def _peer_route(bucket: Bucket[TorusOptions]) -> PeerRoute:
    return PEER_ROUTES[bucket.options.peer_route]


def _of_peers(bucket: Bucket[TorusOptions], topology: Topology) -> tuple[Bucket, Topology]:
    """Return one slot's shard as a bucket of the peers' route, and its peers, one to a node."""
    of_any_route: Bucket = bucket
    part = dataclasses.replace(
        of_any_route,
        route=_among_peers(bucket).name,
        sizes=(bucket.padded // topology.slots,),
        # The shard contains the vector's padding
        padding=0,
        options=bucket.options.peers,
    )
    return part, Topology(topology.nodes, 1)


ROUTE = Torus()
