"""Minimum spanning tree: the whole vector moves along a binomial tree, in ceil(log2 p) rounds.

Broadcast at 5 positions; reduce is the reverse:

    round 0    0 -> 4
    round 1    0 -> 2
    round 2    0 -> 1    2 -> 3

Allreduce is a reduce to position 0, then a broadcast from it.

Source: Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
section 3.2, after Thakur et al., "Optimization of Collective Communication Operations in MPICH"
(2005).
"""

from tfcommx.core import Bucket, Links, Topology, cost
from tfcommx.routes.messages import MessageRoute, Transfer, run_by_round


def schedule(operation: str, positions: int, entries: int, block: int = 0) -> list[Transfer]:
    """Return the transfers of all rounds, as drawn above; the vector is not cut into blocks."""
    steps = (positions - 1).bit_length()
    down = [
        Transfer(step, position, position + reach, 0, entries, False)
        for step in range(steps)
        for reach in [1 << (steps - 1 - step)]
        for position in range(0, positions - reach, 2 * reach)
    ]
    if operation == "broadcast":
        return down
    up = [
        Transfer(steps - 1 - transfer.round, transfer.target, transfer.source, 0, entries, True)
        for transfer in reversed(down)
    ]
    if operation == "reduce":
        return up
    return up + [transfer._replace(round=steps + transfer.round) for transfer in down]


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price, table 1: log2 p (2 alpha + 2 n beta + n gamma).

    The table has one kind of link; here the rounds whose pairs share a node take the link inside.
    """
    # Positions that are certainly on one node, if they begin at a multiple of their number
    together = 1 if topology.uneven else topology.slots
    reaches = [1 << step for step in range((topology.size - 1).bit_length())]
    hops = [
        links.inside if topology.nodes == 1 or together % (2 * reach) == 0 else links.between
        for reach in reaches
    ]
    return sum(cost.spanning_tree("allreduce", bucket.padded_bytes, 2, hop) for hop in hops)


ROUTE = MessageRoute("tree", schedule, run_by_round, seconds)
