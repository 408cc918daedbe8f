"""Linear pipeline: the ranks form a chain; blocks are received, added and sent on at the same time.

Allreduce of 4 blocks at 3 places, each line a link and its direction. Capitals are totals. The sum is made towards place 0,
and each total turns round there at once: every link carries n bytes each way.

    tick      0  1  2  3  4  5  6
    2 -> 1    a  b  c  d
    1 -> 0       a  b  c  d
    0 -> 1          A  B  C  D
    1 -> 2             A  B  C  D

`reduce` is the upper half, `broadcast` the lower one from tick 0.

Source: Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016), section 3 and figure 2. The
paper's allreduce (figure 2c) fills the pipe once too, but goes on around a ring in one direction: 9 ticks for this case. The
way back takes 7, where the two directions of a place have links of their own. Where each place has one port to a switch, a
place in the middle sends both through it, 2 n bytes, and the price is the paper's; with two places it is half of that.
"""

from __future__ import annotations

from typing import Any

from tfcommx import cost
from tfcommx.exchange import moves
from tfcommx.exchange.moves import Move
from tfcommx.terms import Bucket, Links, Topology, Traffic


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
        if operation != "broadcast":
            found += [Move(number + hop, places - 1 - hop, places - 2 - hop, start, stop, True) for hop in range(places - 1)]
        if operation != "reduce":
            turn = number + (places - 1 if operation == "allreduce" else 0)
            found += [Move(turn + hop, hop, hop + 1, start, stop, False) for hop in range(places - 1)]
    return sorted(found, key=lambda move: move.tick)


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Every rank keeps what it owes of the whole vector."""
    return 0, bucket.padded


def run(flat: Any, bucket: Bucket, comm: Any, select: None = None) -> Any:
    """Return the sum of `flat` over all ranks, with the same bits on all: only the root's total is kept. **Ranks:** all."""
    return moves.run(flat, bucket, comm, schedule, moves.as_it_comes)


def wire_bytes(bucket: Bucket, topology: Topology) -> Traffic:
    """Return what one rank sends in a step, as the mean over the ranks: the vector both ways over each of p - 1 links."""
    each = 2 * bucket.padded * bucket.entry_bytes / topology.size
    return Traffic(each * (topology.size - topology.nodes), each * (topology.nodes - 1))


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price: table 1, for one port a place. With two places none is in the middle: 1 + n/b ticks of one block."""
    ranks, total = topology.size, bucket.padded * bucket.entry_bytes
    if ranks == 1 or total == 0:
        return 0.0
    link, block = links.between if topology.nodes > 1 else links.inside, min(bucket.block_bytes, total)
    if ranks == 2:
        return (1 + total / block) * (link.alpha_s + block * (link.beta_s_per_byte + link.gamma_s_per_byte))
    return cost.linear_pipeline("allreduce", total, ranks, link, block)
