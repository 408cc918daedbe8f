"""Linear pipeline: the ranks form a chain; blocks are received, added and sent on at the same time.

Allreduce of 6 blocks at 3 places, each line a link and its direction. Capitals are totals. A sum is
made towards one end of the chain, and the total turns round there at once. Each block has the chain
of its number: a and d are added towards place 0, b and e towards 1, c and f towards 2.

    tick      0  1  2  3  4  5
    2 -> 1    a  b  d  e
    1 -> 0    c  a  f  d
    0 -> 2    b  c  e  f
    0 -> 1          A  C  D  F
    1 -> 2          B  A  E  D
    2 -> 0          C  B  F  E

`reduce` and `broadcast` use one chain: towards place 0, and from it.

Source: Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
section 3 and figure 2. The paper's allreduce (figure 2c) fills the pipe once too, but all blocks
have the same chain: a place in its middle sends 2 n bytes and its ends n. Where each place has one
port, as nodes on a switch have, that port is the limit: turning the chain around spreads the load,
so that each sends 2 (p - 1)/p n bytes, which no allreduce can better.
"""

from __future__ import annotations

import functools

from tfcommx.routes import moves
from tfcommx.routes.moves import Move
from tfcommx.terms import Bucket, Links, Topology


def schedule(operation: str, places: int, entries: int, block: int) -> list[Move]:
    """Return which block goes where at which tick, as drawn above; ticks ascending.

    Args:
        operation: broadcast (from place 0), reduce (to place 0) or allreduce.
        places: ranks in the chain, >= 1.
        entries: length of the vector; the last block may be shorter.
        block: entries of a block, >= 1.
    """
    found = []
    for number, start in enumerate(range(0, entries, block)):
        stop = min(start + block, entries)
        # the totals of one group of p blocks go back while the next group comes
        if operation == "allreduce":
            group, first = divmod(number, places)
            tick = group * max(places - 1, 2)  # between two places, both ways use the same lines
        else:
            tick, first = number, 0
        chain = [(first + place) % places for place in range(places)]
        if operation != "broadcast":
            found += [
                Move(tick + hop, chain[-1 - hop], chain[-2 - hop], start, stop, True)
                for hop in range(places - 1)
            ]
            tick += places - 1
        if operation != "reduce":
            found += [
                Move(tick + hop, chain[hop], chain[hop + 1], start, stop, False)
                for hop in range(places - 1)
            ]
    return sorted(found, key=lambda move: move.tick)


shard = moves.shard
run = functools.partial(moves.run, schedule=schedule, carry=moves.run_when_ready)
wire_bytes = functools.partial(moves.traffic, schedule=schedule)
port_bytes = functools.partial(moves.port_bytes, schedule=schedule)


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price: 2 (p - 1)/p of the blocks go through each port, and the first one hops up
    and down the chain alone.

    Table 1 of the paper has 2 (p - 1 + n/b) messages through the port of a place in the middle of
    its one chain, and pays the start-up of each. Here a direction has several messages under way
    (`moves.WINDOW`), which start up side by side.
    """
    ranks, total = topology.size, bucket.padded * bucket.entry_bytes
    if ranks == 1 or total == 0:
        return 0.0
    link, block = (
        links.between if topology.nodes > 1 else links.inside,
        min(bucket.block_bytes, total),
    )
    travels = block * link.beta_s_per_byte
    # of a block at one place: in and out
    turn = 2 * max(travels, link.alpha_s / moves.WINDOW) + block * link.gamma_s_per_byte
    return (ranks - 1) * (total / (ranks * block) * turn + 2 * (link.alpha_s + travels))
