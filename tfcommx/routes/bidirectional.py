"""Bidirectional exchange: pairs swap halves, then quarters, ...: recursive halving adds, recursive
doubling collects.

Allreduce at 4 places, 4 parts; what each place holds summed so far:

    place         0       1       2       3
    tick 0       ab--    ab--    --cd    --cd     0 <-> 2, 1 <-> 3 swap halves and add
    tick 1       a---    -b--    --c-    ---d     0 <-> 1, 2 <-> 3 swap quarters and add
    tick 2       ab--    ab--    --cd    --cd     0 <-> 1, 2 <-> 3 collect
    tick 3       abcd    abcd    abcd    abcd     0 <-> 2, 1 <-> 3

Reduce ends with a gather to place 0 along the same pairs; broadcast is a scatter (its mirror) and
ticks 2 and 3. With p no power of two, the places beyond the largest one first add their vectors to
those of the lowest places, and get the result from them: the price is then higher than table 1's by
a message of n bytes each way.

Source: Wang et al., "Efficient Communications in Training Large Scale Neural Networks" (2016),
section 3.2, after Thakur et al., "Optimization of Collective Communication Operations in MPICH"
(2005). Their broadcast collects around a ring (p - 1 start-ups); ours by recursive doubling (log2
p).
"""

from __future__ import annotations

import functools
import itertools

from tfcommx import cost
from tfcommx.routes import moves
from tfcommx.routes.moves import Move
from tfcommx.terms import Bucket, Links, Topology


def schedule(operation: str, places: int, entries: int, block: int) -> list[Move]:
    """Return who sends what to whom at which tick, as drawn above; ticks ascending. Empty parts are
    left out.

    Parts are cut in blocks, at the same entries at every tick, so that a block can go on while the
    rest of its part comes.
    """
    steps = places.bit_length() - 1
    core = 1 << steps  # the places that swap; the others lean on one of these
    cut = [entries * part // core for part in range(core + 1)]
    halves, collects, gathers = [], [], []
    for step in range(steps):
        reach = core >> (step + 1)
        for place in range(core):
            # first: of the `reach` parts that the place holds after this step
            other, first = place ^ reach, place & -reach
            partner = other & -reach
            halves.append(Move(step, place, other, cut[partner], cut[partner + reach], True))
            collects.append(
                Move(steps - 1 - step, place, other, cut[first], cut[first + reach], False)
            )
            if place % (2 * reach) == reach:
                gathers.append(
                    Move(
                        steps - 1 - step,
                        place,
                        place - reach,
                        cut[place],
                        cut[place + reach],
                        False,
                    )
                )
    scatters = [
        Move(steps - 1 - move.tick, move.target, move.source, move.start, move.stop, False)
        for move in gathers
    ]
    fold = [Move(0, place, place - core, 0, entries, True) for place in range(core, places)]
    unfold = [Move(0, move.target, move.source, 0, entries, False) for move in fold]
    phases = {
        "broadcast": [scatters, collects, unfold],
        "reduce": [fold, halves, gathers],
        "allreduce": [fold, halves, collects, unfold],
    }[operation]
    found, now = [], 0
    for phase in phases:
        found += sorted(
            Move(
                now + move.tick, move.source, move.target, start, min(start + block, stop), move.add
            )
            for move in phase
            for first, stop in itertools.pairwise(cut)
            if move.start <= first and stop <= move.stop
            for start in range(first, stop, block)
        )
        now += max((move.tick + 1 for move in phase), default=0)
    return found


shard = moves.shard
run = functools.partial(moves.run, schedule=schedule, carry=moves.run_when_ready)
wire_bytes = functools.partial(moves.traffic, schedule=schedule)
port_bytes = functools.partial(moves.port_bytes, schedule=schedule)


def seconds(bucket: Bucket, topology: Topology, links: Links) -> float:
    """Return the price, table 1: 2 log2 p alpha + 2 (p - 1)/p n beta + (p - 1)/p n gamma, where
    each rank has its own link.
    """
    link = links.between if topology.nodes > 1 else links.inside
    return cost.bidirectional_exchange(
        "allreduce", bucket.padded * bucket.entry_bytes, topology.size, link
    )
