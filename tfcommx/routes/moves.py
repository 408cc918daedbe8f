"""Routes made of messages: a schedule is a list of moves between places 0 .. p - 1, a pure
function; two ways to carry it out.

Place 0 is the root, and place i the i-th rank after it, around the end. A move sends part of the
sender's vector; it is added to the receiver's (`add`) or takes its place. Ticks say what may happen
at once when all messages take equally long.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfcommx.terms import Bucket, PlanError, Topology, Traffic, check_name

# messages that each direction has under way: hides the start-up, bounds what waits in memory
WINDOW = 8


class Move(NamedTuple):
    """One message of a schedule."""

    tick: int
    # Place
    source: int
    # Place
    target: int
    # First entry
    start: int
    # After the last entry; > start
    stop: int
    add: bool


# (operation, places, entries, block) -> moves, ticks ascending
Schedule = Callable[[str, int, int, int], list[Move]]
OPERATIONS = ("broadcast", "reduce", "allreduce")


def shard(bucket: Bucket, topology: Topology, rank: int) -> tuple[int, int]:
    """Every rank keeps what it owes of the whole vector."""
    return 0, bucket.padded


def run(
    flat: Any,
    bucket: Bucket,
    comm: Any,
    select: None = None,
    *,
    schedule: Schedule,
    carry: Callable[..., None],
    group: str = "world",
    collective: str | None = None,
) -> Any:
    """Return the sum of `flat` over a group, by messages, with the same bits on all of it.

    `collective` is one of OPERATIONS, the bucket's own by default; after a "reduce" only rank 0 has
    the sum, and a "broadcast" returns rank 0's vector. **Ranks:** all of the group, with the same
    bucket.
    """
    if len(comm.members(group)) == 1:
        return flat
    return comm.run_with_messages(
        lambda array, post: carry_out(
            collective or bucket.collective,
            array,
            comm.members(group),
            comm.rank,
            post,
            schedule,
            carry,
            block=entries_per_block(bucket),
            tag=tag_of(bucket.name),
        ),
        flat,
        f"{bucket.name}/{collective or bucket.collective}",
    )


def carry_out(
    operation: str,
    array: np.ndarray,
    ranks: Sequence[int],
    rank: int,
    post: Any,
    schedule: Schedule,
    carry: Callable[..., None],
    root: int | None = None,
    block: int = 16384,
    tag: int = 0,
) -> np.ndarray:
    """Carry out one broadcast, reduce or allreduce.

    Args:
        operation: "broadcast" returns the root's vector on all ranks, "reduce" the sum on the root
            (elsewhere the own vector comes back), "allreduce" the sum on all, with the same bits.
        array: one-dimensional, of any length, the same length and dtype on every rank; not changed.
        ranks: the ranks that take part, and `rank` among them.
        root: a member of `ranks`; None: the first.
        block: entries of a block, >= 1, where the schedule uses blocks.
        tag: of the messages; different for collectives that may be under way at once.

    **Ranks:** all of `ranks`. **Raises:** PlanError for an unknown operation or a root that does
    not take part.
    """
    check_name("operation", operation, OPERATIONS)
    root = ranks[0] if root is None else root
    if root not in ranks:
        raise PlanError(
            f"The root of a {operation} must take part. Received root={root}, "
            f"ranks={list(ranks)} (rank {rank})."
        )
    shift, result = ranks.index(root), array.copy()
    place = (ranks.index(rank) - shift) % len(ranks)
    if len(ranks) > 1 and len(array):
        moves = _own(schedule, operation, len(ranks), len(array), block, place)
        carry(moves, result, place, lambda other: ranks[(other + shift) % len(ranks)], post, tag)
    return array.copy() if operation == "reduce" and place else result


def run_by_round(
    moves: Sequence[Move],
    vector: np.ndarray,
    place: int,
    rank_of: Callable[[int], int],
    post: Any,
    tag: int,
) -> None:
    """Carry out the moves of one place, tick after tick; within a tick it sends and receives at
    once.

    Needs a schedule where no place sends in a tick what it receives in the same one.
    """
    for _, now in itertools.groupby(moves, key=lambda move: move.tick):
        run_when_ready(list(now), vector, place, rank_of, post, tag)


def run_when_ready(
    moves: Sequence[Move],
    vector: np.ndarray,
    place: int,
    rank_of: Callable[[int], int],
    post: Any,
    tag: int,
) -> None:
    """Carry out the moves of one place as soon as their data are there: neither directions nor
    ticks wait for each other.

    A block leaves when all moves that bring it by earlier ticks have come, and what comes is
    applied in the order of the ticks, so that sums are the same every time. Blocks to one place
    leave in the order of their ticks, in which they are awaited there. Needs a schedule that cuts
    the vector in the same blocks for all moves.
    **Cost:** one copy of each block that is sent, since the vector goes on changing meanwhile.
    """
    # moves from and to each other place that are not under way yet, in order
    waiting: dict[tuple[str, int], deque[Move]] = {}
    turn: dict[Move, int] = {}  # how many moves must have brought the same block before
    awaited: Counter[int] = Counter()  # by the start of a block
    for move in moves:
        comes = move.target == place
        waiting.setdefault(("from", move.source) if comes else ("to", move.target), deque()).append(
            move
        )
        turn[move] = awaited[move.start]
        awaited[move.start] += comes
    under_way: dict[tuple[str, int], deque[_UnderWay]] = {line: deque() for line in waiting}
    came: Counter[int] = Counter()  # as `awaited`
    # (start of a block, turn) -> what has come before its turn
    early: dict[tuple[int, int], tuple[Move, np.ndarray]] = {}

    def go_on() -> None:
        for (way, other), queue in waiting.items():
            while (
                queue
                and len(under_way[way, other]) < WINDOW
                and (way == "from" or turn[queue[0]] <= came[queue[0].start])
            ):
                move = queue.popleft()
                part = vector[move.start : move.stop]
                buffer = np.empty_like(part) if way == "from" else part.copy()
                request = (post.receive if way == "from" else post.send)(
                    buffer, rank_of(other), tag
                )
                under_way[way, other].append(_UnderWay(request, move, buffer))

    go_on()
    while fronts := [queue for queue in under_way.values() if queue]:
        _, move, buffer = fronts[post.wait_any([queue[0].request for queue in fronts])].popleft()
        if move.target == place:
            early[move.start, turn[move]] = move, buffer
            while ready := early.pop((move.start, came[move.start]), None):
                _apply(*ready, vector)
                came[move.start] += 1
        go_on()


class _UnderWay(NamedTuple):
    request: Any
    move: Move
    # Must live until the request is done
    buffer: np.ndarray


def traffic(
    bucket: Bucket, topology: Topology, *, schedule: Schedule, collective: str | None = None
) -> Traffic:
    """Count the bytes of one collective of the bucket over all ranks: what one rank sends, as the
    mean over the ranks.
    """
    inside = between = 0
    for source, target, amount in _messages(bucket, topology, schedule, collective):
        if source == target:
            inside += amount
        else:
            between += amount
    return Traffic(inside / topology.size, between / topology.size)


def port_bytes(bucket: Bucket, topology: Topology, *, schedule: Schedule) -> float:
    """Return the bytes through the busiest port of a node, in its busier direction."""
    ports: Counter[tuple[str, int]] = Counter()
    for source, target, amount in _messages(bucket, topology, schedule, None):
        if source != target:
            ports["out", source] += amount
            ports["in", target] += amount
    return float(max(ports.values(), default=0))


def _messages(
    bucket: Bucket, topology: Topology, schedule: Schedule, collective: str | None
) -> Iterator[tuple[int, int, int]]:
    """Yield (node of the sender, node of the receiver, bytes) of every message."""
    moves = schedule(
        collective or bucket.collective, topology.size, bucket.padded, entries_per_block(bucket)
    )
    for move in moves if topology.size > 1 else []:
        yield (
            topology.node_of(move.source),
            topology.node_of(move.target),
            (move.stop - move.start) * bucket.entry_bytes,
        )


def entries_per_block(bucket: Bucket) -> int:
    """Return the entries of a block, >= 1."""
    return bucket.block_bytes // bucket.entry_bytes


def tag_of(name: str) -> int:
    """Return the tag of a collective's messages: the same on every rank, in [0, 2**15), which every
    MPI allows.
    """
    return zlib.crc32(name.encode()) % 2**15


@functools.lru_cache(maxsize=256)
def _own(
    schedule: Schedule, operation: str, places: int, entries: int, block: int, place: int
) -> tuple[Move, ...]:
    """Return the moves of one place, the same ones every step, in messages of at most a block.

    Two long messages that meet on a link wait for each other in Open MPI's TCP: short ones use both
    directions.
    """
    return tuple(
        move._replace(start=start, stop=min(start + block, move.stop))
        for move in schedule(operation, places, entries, block)
        if place in (move.source, move.target)
        for start in range(move.start, move.stop, block)
    )


def _apply(move: Move, buffer: np.ndarray, vector: np.ndarray) -> None:
    part = vector[move.start : move.stop]
    if move.add:
        np.add(part, buffer, out=part)
    else:
        part[...] = buffer
