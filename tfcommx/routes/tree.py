"""Minimum spanning tree: the whole vector moves along a binomial tree, in ceil(log2 p) steps each
way.

Broadcast at 5 places, reduce is the same backwards:

    tick 0    0 -> 4
    tick 1    0 -> 2
    tick 2    0 -> 1    2 -> 3

Allreduce is a reduce to place 0, then a broadcast from it.

Source: Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
section 3.2, after Thakur et al., "Optimization of Collective Communication Operations in MPICH"
(2005).
"""

from __future__ import annotations

import functools

from tfcommx import cost
from tfcommx.routes import moves
from tfcommx.routes.moves import Move
from tfcommx.terms import Bucket, Links, Topology


def schedule(operation: str, places: int, entries: int, block: int = 0) -> list[Move]:
    """Return who sends the vector to whom at which tick, as drawn above; ticks ascending. It is not
    cut in blocks.
    """
    steps = (places - 1).bit_length()
    down = [
        Move(tick, place, place + reach, 0, entries, False)
        for tick in range(steps)
        for reach in [1 << (steps - 1 - tick)]
        for place in range(0, places - reach, 2 * reach)
    ]
    if operation == "broadcast":
        return down
    up = [
        Move(steps - 1 - move.tick, move.target, move.source, 0, entries, True)
        for move in reversed(down)
    ]
    return (
        up
        if operation == "reduce"
        else up + [move._replace(tick=steps + move.tick) for move in down]
    )


shard = moves.shard
run = functools.partial(moves.run, schedule=schedule, carry=moves.run_by_round)
wire_bytes = functools.partial(moves.traffic, schedule=schedule)
port_bytes = functools.partial(moves.port_bytes, schedule=schedule)


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price, table 1: log2 p (2 alpha + 2 n beta + n gamma), where each rank has a link
    of its own.
    """
    link = links.between if topology.nodes > 1 else links.inside
    return cost.spanning_tree("allreduce", bucket.padded * bucket.entry_bytes, topology.size, link)
