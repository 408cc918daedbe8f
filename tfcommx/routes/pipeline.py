"""Linear pipeline: in a chain of ranks, blocks are received, added and sent on at the same time.

Allreduce of 6 blocks at 3 positions, each line a link and its direction. Capitals are totals. A sum
moves towards one end of the chain, and the total turns round there at once. The chain of a block
depends on its number: a and d are added towards position 0, b and e towards 1, c and f towards 2.

    round     0  1  2  3  4  5
    2 -> 1    a  b  d  e
    1 -> 0    c  a  f  d
    0 -> 2    b  c  e  f
    0 -> 1          A  C  D  F
    1 -> 2          B  A  E  D
    2 -> 0          C  B  F  E

`reduce` and `broadcast` use one chain: towards position 0, and from it.

Source: Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
section 3 and figure 2. The paper's allreduce (figure 2c) also fills the pipe once, but all blocks
have the same chain: a position in its middle sends 2 n bytes and its ends n. We rotate the chain,
because a port is the limit if each position has one, as nodes on a switch have. The load is then
spread: each position sends 2 (p - 1)/p n bytes; no allreduce can send less. The paper's reduce also
multiplies; ours only adds, because gradients need nothing else.
"""

from tfcommx.core import Bucket, Links, Topology
from tfcommx.routes.messages import WINDOW, MessageOptions, MessageRoute, Transfer, run_when_ready


def schedule(operation: str, positions: int, entries: int, block: int) -> list[Transfer]:
    """Return the transfers of all blocks, as drawn above; the last block may be shorter."""
    transfers: list[Transfer] = []
    for number, start in enumerate(range(0, entries, block)):
        stop = min(start + block, entries)
        # The totals of one group of p blocks return while the next group is added
        if operation == "allreduce":
            group, first = divmod(number, positions)
            # At least 2, because between two positions both ways use the same lines
            first_round = group * max(positions - 1, 2)
        else:
            first_round, first = number, 0
        chain = [(first + position) % positions for position in range(positions)]
        if operation != "broadcast":
            transfers += [
                Transfer(first_round + hop, chain[-1 - hop], chain[-2 - hop], start, stop, True)
                for hop in range(positions - 1)
            ]
            first_round += positions - 1
        if operation != "reduce":
            transfers += [
                Transfer(first_round + hop, chain[hop], chain[hop + 1], start, stop, False)
                for hop in range(positions - 1)
            ]
    return sorted(transfers, key=lambda transfer: transfer.round)


def seconds(bucket: Bucket[MessageOptions], topology: Topology, links: Links) -> float:
    """Return the price: 2 (p - 1)/p of the blocks pass each port, after the first one's hops.

    A reduce and the broadcast after it have one chain: twice all blocks pass each port.
    """
    ranks, total = topology.size, bucket.padded_bytes
    if ranks == 1 or total == 0:
        return 0.0
    # The slowest link sets the pace, because all blocks pass all positions
    link = links.slowest(topology)
    block = min(bucket.options.block_bytes, total)
    travels = block * link.beta_s_per_byte
    # Seconds of a block at one position, in and out. Table 1 of the paper has 2 (p - 1 + n/b)
    # messages through the port of a position in the middle of its one chain, with the latency of
    # each. Here latencies overlap, because a direction has several messages under way
    turn = 2 * max(travels, link.alpha_s / WINDOW) + block * link.gamma_s_per_byte
    share = 1.0 if bucket.options.collective == "reduce" else (ranks - 1) / ranks
    return share * total / block * turn + 2 * (ranks - 1) * (link.alpha_s + travels)


ROUTE = MessageRoute("pipeline", schedule, run_when_ready, seconds)
