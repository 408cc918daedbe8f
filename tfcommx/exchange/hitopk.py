"""HiTopKComm: reduce-scatter in the node, select from the shard, all-gather the pairs among peers, all-gather in the node.

         node 0                      node 1
    slot 0     slot 1           slot 0     slot 1
    [a b]      [c d]            [e f]      [g h]        gradients, two halves each
     a+c        b+d              e+g        f+h         1. reduce-scatter in the node
     top(a+c)   top(b+d)         top(e+g)   top(f+h)    2. select; what stays is this rank's residual
     top(a+c) + top(e+g)         the same               3. all-gather of pairs among peers, merged
    [both halves]                [both halves]          4. all-gather in the node

Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters" (2021), section 3.2,
Algorithm 2. We add the residual, which is kept on the shard where the selection is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfcommx import cost, wire
from tfcommx.terms import Bucket, Links, Sparse, Topology, Traffic


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Slot j selects from, and keeps the residual of, the j-th of n equal parts of its node's sum."""
    length = bucket.padded // topology.slots
    start = rank % topology.slots * length
    return start, start + length


def run(flat: Any, bucket: Bucket, comm: Any, select: Callable[[Any], Sparse]) -> Any:
    """Return the sum over all nodes of what was selected, as a dense vector. **Ranks:** all. **Cost:** three collectives."""
    part = comm.reduce_scatter(flat, "node", f"{bucket.name}/scatter")
    pairs = comm.all_gather(wire.encode(select(part)), "peers", f"{bucket.name}/pairs")
    merged = wire.merge(pairs, bucket.k, bucket.padded // comm.topology.slots)
    return comm.all_gather(merged, "node", f"{bucket.name}/gather")


def wire_bytes(bucket: Bucket, topology: Topology) -> Traffic:
    """Return what one rank sends in a step: 2 (n - 1)/n of the vector in its node, its k pairs to each of m - 1 peers."""
    n, total = topology.slots, bucket.padded * bucket.entry_bytes
    return Traffic(2 * (n - 1) / n * total, float((topology.nodes - 1) * wire.size_bytes(bucket.k)))


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price, equations 7, 9 and 10 with the shard sent dense in the last step.

    The n slots of a node share its link to the others. Equation 8, the selection, is priced at the link's gamma per byte.
    """
    n, total = topology.slots, bucket.padded * bucket.entry_bytes
    inside = cost.reduce_scatter(total, n, links.inside) + cost.all_gather(total / n, n, links.inside)
    selection = total / n * links.inside.gamma_s_per_byte
    return inside + selection + cost.all_gather(n * wire.size_bytes(bucket.k), topology.nodes, links.between)
