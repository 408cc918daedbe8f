"""HiTopKComm: reduce-scatter in the node, select from the shard, all-gather the pairs among peers,
all-gather in the node.

         node 0                      node 1
    slot 0     slot 1           slot 0     slot 1
    [a b]      [c d]            [e f]      [g h]        gradients, two halves each
     a+c        b+d              e+g        f+h         1. reduce-scatter in the node
     top(a+c)   top(b+d)         top(e+g)   top(f+h)    2. select; what stays is this rank's
     residual top(a+c) + top(e+g)         the same               3. all-gather of pairs among peers,
     merged
    [both halves]                [both halves]          4. all-gather in the node

Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (2021), section 3.2, Algorithm 2. We add the residual, which is kept on the shard where
the selection is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfcommx import cost
from tfcommx.terms import LAST_STEPS, Bucket, Links, Sparse, Topology, Traffic
from tfcommx.wire import codec


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Slot j selects from, and keeps the residual of, the j-th of n equal parts of its
    node's sum.
    """
    length = bucket.padded // topology.slots
    start = rank % topology.slots * length
    return start, start + length


def run(flat: Any, bucket: Bucket, comm: Any, select: Callable[[Any], Sparse]) -> Any:
    """Return the sum over all nodes of what was selected, as a dense vector. **Ranks:** all.
    **Cost:** three collectives.
    """
    part = comm.reduce_scatter(flat, "node", f"{bucket.name}/scatter")
    pairs = comm.all_gather(
        codec.encode(select(part), bucket.wire), "peers", f"{bucket.name}/pairs"
    )
    slots = comm.topology.slots
    if bucket.last_step == "dense":
        merged = codec.merge(pairs, bucket.k, bucket.padded // slots, bucket.wire)
        return comm.all_gather(merged, "node", f"{bucket.name}/gather")
    pairs = comm.all_gather(pairs, "node", f"{bucket.name}/gather")
    return codec.merge(pairs, bucket.k, bucket.padded // slots, bucket.wire, shards=slots)


def wire_bytes(bucket: Bucket, topology: Topology) -> Traffic:
    """Return what one rank sends in a step: its k entries to each of m - 1 peers, and in its node
    two steps around the ring.

    In the node: (n - 1)/n of the vector, then n - 1 times its merged shard or its m buffers of
    pairs.
    """
    n, total = topology.slots, bucket.padded * bucket.entry_bytes
    last = (
        total / n
        if bucket.last_step == "dense"
        else topology.nodes * _pairs_bytes(bucket, topology)
    )
    return Traffic(
        (n - 1) / n * total + (n - 1) * last,
        float((topology.nodes - 1) * _pairs_bytes(bucket, topology)),
    )


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price, equations 7 to 10; step 4 is `_last_seconds`.

    The n slots of a node share its link to the others, where the paper gives each a stream of its
    own. Equation 8, the selection, is priced at the link's gamma per byte.
    """
    n, total = topology.slots, bucket.padded * bucket.entry_bytes
    scatter = cost.reduce_scatter(total, n, links.inside)
    selection = total / n * links.inside.gamma_s_per_byte
    peers = cost.all_gather(n * _pairs_bytes(bucket, topology), topology.nodes, links.between)
    return scatter + selection + peers + _last_seconds(bucket, topology, links)


def cheapest(bucket: Bucket, topology: Topology, links: Links) -> Bucket:
    """Return the bucket with the last step that costs less: a pure function, so equal on every
    rank. Ties stay dense.
    """
    choices = [dataclasses.replace(bucket, last_step=last_step) for last_step in LAST_STEPS]
    return min(choices, key=lambda choice: _last_seconds(choice, topology, links))


def _last_seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Price step 4: one shard is merged and sent dense, or the pairs that came are sent (equation
    10) and n shards merged.
    """
    n, m, pairs = topology.slots, topology.nodes, _pairs_bytes(bucket, topology)
    merged, own = (
        (1, bucket.padded * bucket.entry_bytes / n)
        if bucket.last_step == "dense"
        else (n, m * pairs)
    )
    return (
        cost.all_gather(own, n, links.inside) + merged * m * pairs * links.inside.gamma_s_per_byte
    )


def _pairs_bytes(bucket: Bucket, topology: Topology) -> int:
    return codec.size_bytes(bucket.k, bucket.padded // topology.slots, bucket.wire)
