"""2D-torus allreduce: reduce-scatter in the node, allreduce among peers, all-gather in the node.

Between nodes each rank moves only its shard, so all slots of a node share the node's traffic. The
allreduce among peers is the engine's own, or one of the routes of messages (`Scheme.peer_route`).

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash" (2018),
section 3.2; named 2DTAR in Shi et al., "Towards Scalable Distributed Training of Deep Learning on
Public Cloud Clusters" (2021), section 5.3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfcommx import cost, routes
from tfcommx.terms import Bucket, Link, Links, Topology, Traffic


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Every rank keeps what it owes of the whole vector."""
    return 0, bucket.padded


def run(flat: Any, bucket: Bucket, comm: Any, select: None = None) -> Any:
    """Return the sum of `flat` over all ranks. **Ranks:** all. **Cost:** three collectives."""
    part = comm.reduce_scatter(flat, "node", f"{bucket.name}/scatter")
    part = routes.route(bucket.peer_route).run(part, bucket, comm, group="peers")
    return comm.all_gather(part, "node", f"{bucket.name}/gather")


def wire_bytes(bucket: Bucket, topology: Topology) -> Traffic:
    """Return what one rank sends in a step: 2 (n - 1)/n of the vector in its node, and its shard by
    the peers' route.
    """
    n, total = topology.slots, bucket.padded * bucket.entry_bytes
    part, peers = _of_peers(bucket, topology)
    return Traffic(
        2 * (n - 1) / n * total, routes.route(part.route).wire_bytes(part, peers).between
    )


def port_bytes(bucket: Bucket, topology: Topology) -> float:
    """Return the bytes through the busiest port of a node: the shards of all its slots."""
    return topology.slots * routes.port_bytes(*_of_peers(bucket, topology))


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price: the three steps follow each other; the n slots of a node share its link to
    the others.
    """
    n, total = topology.slots, bucket.padded * bucket.entry_bytes
    inside = cost.reduce_scatter(total, n, links.inside) + cost.all_gather(
        total / n, n, links.inside
    )
    port = links.between
    part, peers = _of_peers(bucket, topology)
    shared = links._replace(
        between=Link(port.alpha_s, n * port.beta_s_per_byte, port.gamma_s_per_byte)
    )
    return inside + routes.route(part.route).seconds(part, peers, shared)


def _of_peers(bucket: Bucket, topology: Topology) -> tuple[Bucket, Topology]:
    """Return one slot's shard as a bucket of the peers' route, and its peers, one to a node."""
    entries = bucket.padded // topology.slots
    return dataclasses.replace(
        bucket, route=bucket.peer_route, sizes=(entries,), padding=0
    ), Topology(topology.nodes, 1)
