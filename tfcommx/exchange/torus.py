"""2D-torus allreduce: reduce-scatter in the node, allreduce among peers, all-gather in the node.

Between nodes each rank moves only its shard, so all slots of a node share the node's traffic.

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash" (2018), section 3.2; named 2DTAR in
Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters" (2021), section 5.3.
"""

from __future__ import annotations

from typing import Any

from tfcommx import cost
from tfcommx.terms import Bucket, Links, Topology, Traffic


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Every rank keeps what it owes of the whole vector."""
    return 0, bucket.padded


def run(flat: Any, bucket: Bucket, comm: Any, select: None = None) -> Any:
    """Return the sum of `flat` over all ranks. **Ranks:** all. **Cost:** three collectives."""
    part = comm.reduce_scatter(flat, "node", f"{bucket.name}/scatter")
    part = comm.allreduce(part, "peers", f"{bucket.name}/peers")
    return comm.all_gather(part, "node", f"{bucket.name}/gather")


def wire_bytes(bucket: Bucket, topology: Topology) -> Traffic:
    """Return what one rank sends in a step: 2 (n - 1)/n of the vector in its node, 2 (m - 1)/m of its shard to its peers."""
    m, n, total = topology.nodes, topology.slots, bucket.padded * bucket.entry_bytes
    return Traffic(2 * (n - 1) / n * total, 2 * (m - 1) / m * total / n)


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price: the three steps follow each other; the n slots of a node share its link to the others."""
    n, total = topology.slots, bucket.padded * bucket.entry_bytes
    inside = cost.reduce_scatter(total, n, links.inside) + cost.all_gather(total / n, n, links.inside)
    return inside + cost.all_reduce(total, topology.nodes, links.between)
