"""Seconds from bytes and a link: the primitives of the alpha-beta-gamma model.

They price algorithms on an idle network; `simulator.step` adds the time of the engine.

Source: the ring algorithms' prices of Shi et al., "Towards Scalable Distributed Training of Deep
Learning on Public Cloud Clusters" (2021), section 3.2, equations 3 and 7 to 10. The paper counts
log p latency terms for an all-gather, and so do we. A ring needs p - 1, an all-gather by recursive
doubling log p. Additions (gamma) are ours; the paper counts none. The prices of messages are table
1 of Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016).
"""

import math

from tfcommx.core import Link, Topology, Traffic


def reduce_scatter(total_bytes: float, ranks: int, link: Link) -> float:
    """Price a ring reduce-scatter of a vector of `total_bytes`.

    Every rank sends and reduces (p - 1)/p of the vector.

    >>> reduce_scatter(400, 2, Link(alpha_s=1, beta_s_per_byte=0.5, gamma_s_per_byte=0.25))
    151.0
    """
    share = total_bytes * (ranks - 1) / ranks
    return (ranks - 1) * link.alpha_s + share * (link.beta_s_per_byte + link.gamma_s_per_byte)


def all_gather(own_bytes: float, ranks: int, link: Link) -> float:
    """Price an all-gather of `own_bytes` from each rank: every rank receives p - 1 times that.

    >>> all_gather(100, 4, Link(alpha_s=1, beta_s_per_byte=0.5))
    152.0
    """
    return math.log2(ranks) * link.alpha_s + (ranks - 1) * own_bytes * link.beta_s_per_byte


def all_reduce(total_bytes: float, ranks: int, link: Link) -> float:
    """Price a ring allreduce: a reduce-scatter, then a ring all-gather of the shards.

    Both have p - 1 latency terms.
    """
    share = total_bytes * (ranks - 1) / ranks
    return (
        reduce_scatter(total_bytes, ranks, link)
        + (ranks - 1) * link.alpha_s
        + share * link.beta_s_per_byte
    )


def ring_traffic(sent: float, group: str, topology: Topology) -> Traffic:
    """Split the bytes that a rank sends around a group's ring by their destination, as the mean."""
    # The world's ring, in rank order, leaves each node once
    shares = {"node": 0.0, "peers": 1.0, "world": topology.nodes / topology.size}
    leaves = shares[group] if topology.nodes > 1 else 0.0
    return Traffic(sent - sent * leaves, sent * leaves)


def broadcast_traffic(total_bytes: float, topology: Topology) -> Traffic:
    """Count the mean bytes that one rank sends in a broadcast along a chain of all ranks."""
    # The chain of ranks leaves each node but the last one once
    inside, between = topology.size - topology.nodes, topology.nodes - 1
    return Traffic(total_bytes * inside / topology.size, total_bytes * between / topology.size)


def alltoall_traffic(sent: float, group: str, topology: Topology) -> Traffic:
    """Split the bytes that a rank sends equally to all others in a flat alltoall, as the mean."""
    if topology.nodes == 1 or group == "node" or topology.size == 1:
        return Traffic(sent, 0.0)
    if group == "peers":
        return Traffic(0.0, sent)
    # The share of the ordered pairs of ranks that are on one node
    pairs = sum(slots * (slots - 1) for slots in topology.slots_by_node)
    inside = pairs / (topology.size * (topology.size - 1))
    return Traffic(sent * inside, sent * (1 - inside))


# --- Messages between two ranks: table 1 of Wang et al. (2016) ------------------------------------


def linear_pipeline(
    operation: str, total_bytes: float, ranks: int, link: Link, block_bytes: float = 65536
) -> float:
    """Price a pipeline as in the paper, whose allreduce is a reduce, then a broadcast.

    The table counts p - 1 + n/b rounds. The last block arrives in round p - 2 + n/b: figure 2 has 5
    rounds for 3 GPUs and 4 blocks.

    Args:
        operation: "broadcast", "reduce" or "allreduce".
        ranks: p, >= 1.
        link: link between any two ranks.
        block_bytes: bytes of a block; the default is the paper's size.
    """
    n, p, b = total_bytes, ranks, block_bytes
    latencies, per_byte = _latencies_and_seconds_per_byte(operation, link)
    return latencies * (p - 1 + n / b) * link.alpha_s + (b * (p - 1) + n) * per_byte


def spanning_tree(operation: str, total_bytes: float, ranks: int, link: Link) -> float:
    """Price a binomial tree that carries whole messages, in ceil(log2 p) rounds.

    The paper omits the ceiling.
    """
    latencies, per_byte = _latencies_and_seconds_per_byte(operation, link)
    return math.ceil(math.log2(ranks)) * (latencies * link.alpha_s + total_bytes * per_byte)


def bidirectional_exchange(operation: str, total_bytes: float, ranks: int, link: Link) -> float:
    """Price recursive halving and doubling; a broadcast collects around a ring.

    The paper omits the ceiling of log2 p, and the messages of ranks beyond a power of two.
    """
    steps, share = math.ceil(math.log2(ranks)), (ranks - 1) / ranks * total_bytes
    latencies = {
        "broadcast": steps + ranks - 1,
        "reduce": 2 * steps,
        "allreduce": 2 * steps,
    }[operation]
    gamma = 0.0 if operation == "broadcast" else link.gamma_s_per_byte
    return latencies * link.alpha_s + share * (2 * link.beta_s_per_byte + gamma)


def _latencies_and_seconds_per_byte(operation: str, link: Link) -> tuple[int, float]:
    beta, gamma = link.beta_s_per_byte, link.gamma_s_per_byte
    return {
        "broadcast": (1, beta),
        "reduce": (1, beta + gamma),
        "allreduce": (2, 2 * beta + gamma),
    }[operation]
