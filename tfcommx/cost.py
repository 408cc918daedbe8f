"""Seconds from bytes and a link: the alpha-beta-gamma model's primitives, in the order of the
exchange table.

Source: the ring algorithms' prices of Shi et al., "Towards Scalable Distributed Training of Deep
Learning on Public Cloud Clusters" (2021), section 3.2, equations 3 and 7 to 10. The paper counts an
all-gather's start-ups as log p; a ring needs p - 1, and an all-gather by recursive doubling log p:
we follow the paper.
"""

from __future__ import annotations

import math

from tfcommx.terms import Link, Topology, Traffic


def reduce_scatter(total_bytes: float, ranks: int, link: Link) -> float:
    """Ring reduce-scatter of a vector of `total_bytes`: every rank sends and reduces (p - 1)/p of
    it.
    """
    share = total_bytes * (ranks - 1) / ranks
    return (ranks - 1) * link.alpha_s + share * (link.beta_s_per_byte + link.gamma_s_per_byte)


def all_gather(own_bytes: float, ranks: int, link: Link) -> float:
    """All-gather of `own_bytes` from each rank: every rank receives (p - 1) times that."""
    return math.log2(ranks) * link.alpha_s + (ranks - 1) * own_bytes * link.beta_s_per_byte


def all_reduce(total_bytes: float, ranks: int, link: Link) -> float:
    """Ring allreduce: a reduce-scatter, then the shards go round once more, both with p - 1
    start-ups.
    """
    share = total_bytes * (ranks - 1) / ranks
    return (
        reduce_scatter(total_bytes, ranks, link)
        + (ranks - 1) * link.alpha_s
        + share * link.beta_s_per_byte
    )


def ring_traffic(sent: float, group: str, topology: Topology) -> Traffic:
    """Split the bytes that a rank sends around a group's ring into those that stay in its node and
    those that leave it.

    In rank order the world's ring leaves each node once, so 1 / slots of its bytes do, as the mean
    over the ranks.
    """
    leaves = (
        {"node": 0.0, "peers": 1.0, "world": topology.nodes / topology.size}[group]
        if topology.nodes > 1
        else 0.0
    )
    return Traffic(sent - sent * leaves, sent * leaves)


def broadcast_traffic(total_bytes: float, topology: Topology) -> Traffic:
    """Count what one rank sends, as the mean over the ranks, when a vector goes from rank to rank
    along all of them.
    """
    return Traffic(
        *(
            total_bytes * hops / topology.size
            for hops in (topology.size - topology.nodes, topology.nodes - 1)
        )
    )


def alltoall_traffic(sent: float, group: str, topology: Topology) -> Traffic:
    """Split what a rank sends in a flat alltoall, equally to each other rank, as the mean over the
    ranks.
    """
    if topology.nodes == 1 or group == "node" or topology.size == 1:
        return Traffic(sent, 0.0)
    if group == "peers":
        return Traffic(0.0, sent)
    nodes = [slots for _, slots in topology.uneven] or [topology.slots] * topology.nodes
    inside = sum(slots * (slots - 1) for slots in nodes) / (topology.size * (topology.size - 1))
    return Traffic(sent * inside, sent * (1 - inside))


# --- table 1 of Wang et al., "Efficient Communications in Training Large Scale Neural Networks"
# (2016) ------------------


def linear_pipeline(
    operation: str, total_bytes: float, ranks: int, link: Link, block_bytes: float = 65536
) -> float:
    """Price a pipeline whose allreduce is a reduce followed by a broadcast, as the
    paper counts it.
    """
    n, p, b = total_bytes, ranks, block_bytes
    beta, gamma = link.beta_s_per_byte, link.gamma_s_per_byte
    starts, per_byte = {
        "broadcast": (1, beta),
        "reduce": (1, beta + gamma),
        "allreduce": (2, 2 * beta + gamma),
    }[operation]
    return starts * (p - 1 + n / b) * link.alpha_s + (b * (p - 1) + n) * per_byte


def spanning_tree(operation: str, total_bytes: float, ranks: int, link: Link) -> float:
    """Price a binomial tree that carries whole messages."""
    n, beta, gamma = total_bytes, link.beta_s_per_byte, link.gamma_s_per_byte
    starts, per_byte = {
        "broadcast": (1, beta),
        "reduce": (1, beta + gamma),
        "allreduce": (2, 2 * beta + gamma),
    }[operation]
    return math.ceil(math.log2(ranks)) * (starts * link.alpha_s + n * per_byte)


def bidirectional_exchange(operation: str, total_bytes: float, ranks: int, link: Link) -> float:
    """Price recursive halving and doubling."""
    p, share = ranks, (ranks - 1) / ranks * total_bytes
    starts = {
        "broadcast": math.log2(p) + p - 1,
        "reduce": 2 * math.log2(p),
        "allreduce": 2 * math.log2(p),
    }[operation]
    gamma = 0.0 if operation == "broadcast" else link.gamma_s_per_byte
    return starts * link.alpha_s + share * (2 * link.beta_s_per_byte + gamma)
