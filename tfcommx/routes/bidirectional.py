"""Bidirectional exchange: pairs swap halves, then quarters: recursive halving and doubling.

Halving adds, doubling collects. Allreduce at 4 positions, 4 parts; the sums that each position has
so far:

    position      0       1       2       3
    round 0      ab--    ab--    --cd    --cd     0 <-> 2, 1 <-> 3 swap halves and add
    round 1      a---    -b--    --c-    ---d     0 <-> 1, 2 <-> 3 swap quarters and add
    round 2      ab--    ab--    --cd    --cd     0 <-> 1, 2 <-> 3 collect
    round 3      abcd    abcd    abcd    abcd     0 <-> 2, 1 <-> 3

Reduce ends with a gather to position 0 along the same pairs; broadcast is a scatter (its mirror)
and rounds 2 and 3. If p is not a power of two, the positions beyond the largest power first add
their vectors to those of the lowest positions, and receive the result from them. Table 1 omits
these messages of n bytes each way; `seconds` has them.

Source: Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
section 3.2, after Thakur et al., "Optimization of Collective Communication Operations in MPICH"
(2005). Their broadcast collects around a ring (p - 1 latency terms); ours by recursive doubling
(log2 p).
"""

import dataclasses
import itertools

from tfcommx import engines
from tfcommx.core import Bucket, Links, Topology, cost
from tfcommx.routes.messages import MessageOptions, MessageRoute, Transfer, run_when_ready


def schedule(operation: str, positions: int, entries: int, block: int) -> list[Transfer]:
    """Return the transfers of all rounds, as drawn above; empty parts are left out.

    Parts are cut into blocks, at the same entries in every round, so that a block can be sent on
    while the rest of its part arrives.
    """
    # Number of positions that swap; each of the others depends on one of these
    core = 1 << (positions.bit_length() - 1)
    cut = [entries * part // core for part in range(core + 1)]
    halves, collects, gathers = _swaps(core, cut)
    last = core.bit_length() - 2
    scatters = [
        transfer._replace(
            round=last - transfer.round, source=transfer.target, target=transfer.source
        )
        for transfer in gathers
    ]
    fold = [Transfer(0, extra, extra - core, 0, entries, True) for extra in range(core, positions)]
    unfold = [Transfer(0, transfer.target, transfer.source, 0, entries, False) for transfer in fold]
    phases = {
        "broadcast": [scatters, collects, unfold],
        "reduce": [fold, halves, gathers],
        "allreduce": [fold, halves, collects, unfold],
    }[operation]
    transfers: list[Transfer] = []
    first_round = 0
    for phase in phases:
        transfers += sorted(_in_blocks(phase, cut, block, first_round))
        first_round += max((transfer.round + 1 for transfer in phase), default=0)
    return transfers


def _swaps(core: int, cut: list[int]) -> tuple[list[Transfer], list[Transfer], list[Transfer]]:
    """Return the transfers that halve and add, those that collect, and those that gather at 0."""
    # `core` positions, a power of two; `cut`: the first entry of as many parts, and the end
    steps = core.bit_length() - 1
    halves, collects, gathers = [], [], []
    for step, position in itertools.product(range(steps), range(core)):
        reach, back = core >> (step + 1), steps - 1 - step
        # Pairs differ in one bit of their positions, in the highest one first. `first`: the first
        # of the `reach` parts that the position holds after this step
        peer, first = position ^ reach, position & -reach
        first_of_peer = peer & -reach
        kept_part = cut[first], cut[first + reach]
        given_part = cut[first_of_peer], cut[first_of_peer + reach]
        halves.append(Transfer(step, position, peer, *given_part, True))
        collects.append(Transfer(back, position, peer, *kept_part, False))
        if position % (2 * reach) == reach:
            gathers.append(Transfer(back, position, position - reach, *kept_part, False))
    return halves, collects, gathers


def _in_blocks(
    phase: list[Transfer], cut: list[int], block: int, first_round: int
) -> list[Transfer]:
    """Cut each transfer into blocks inside parts, and add `first_round` to its round."""
    return [
        transfer._replace(
            round=first_round + transfer.round, start=start, stop=min(start + block, stop)
        )
        for transfer in phase
        for first, stop in itertools.pairwise(cut)
        if transfer.start <= first and stop <= transfer.stop
        for start in range(first, stop, block)
    ]


def seconds(bucket: Bucket[MessageOptions], topology: Topology, links: Links) -> float:
    """Return the price, table 1: 2 log2 p alpha + 2 (p - 1)/p n beta + (p - 1)/p n gamma.

    The table has a link for each rank, and powers of two. Here the slots of a node share its port
    when all exchange with other nodes, and the other positions pay for two messages of n bytes.
    """
    total, engine = bucket.padded_bytes, engines.of(links)
    hops = engine.doubling(topology, links)
    # Halving and doubling swap half of the vector over the largest distance, a quarter over half of
    # it, ...; in each a pair adds a part and returns it, as a tree of two positions
    price = sum(
        cost.spanning_tree("allreduce", total / 2**step, 2, hop)
        for step, hop in enumerate(reversed(hops), start=1)
    )
    core = 1 << len(hops)
    if bucket.options.collective == "reduce":
        # Gathering the sums and scattering the weights send as much again, without additions
        link = dataclasses.replace(links.slowest(topology), gamma_s_per_byte=0.0)
        price += cost.bidirectional_exchange("allreduce", total, core, link)
    if beyond := topology.size - core:
        port = engine.port(links, min(beyond, topology.slots))
        link = port if topology.nodes > 1 else links.inside
        price += cost.spanning_tree("allreduce", total, 2, link)
    return price


ROUTE = MessageRoute("bidirectional", schedule, run_when_ready, seconds)
