"""Schedules of messages as lists of moves between positions 0 .. p - 1, and two ways to run them.

Position 0 is the root, and position i the i-th rank after it, around the end. A move sends part of
the sender's vector; it is added to the receiver's (`add`) or replaces it. Rounds say what may
happen at once if all messages take equally long.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfcommx.terms import PlanError, check_name

if TYPE_CHECKING:
    from tfcommx.comm.point_to_point import PointToPoint

OPERATIONS = ("broadcast", "reduce", "allreduce")
# Messages that each direction has under way: hides the latency, bounds what waits in memory.
WINDOW = 8


class Move(NamedTuple):
    """One message of a schedule."""

    # >= 0; a schedule lists its moves with ascending rounds.
    round: int
    # Position of the sender.
    source: int
    # Position of the receiver.
    target: int
    # First entry of the vector that is sent.
    start: int
    # After the last entry; > start.
    stop: int
    # Is it added to the receiver's entries? Otherwise it replaces them.
    add: bool


# (operation, positions, entries, entries of a block) -> moves, rounds ascending
Schedule = Callable[[str, int, int, int], list[Move]]


class Participants(NamedTuple):
    """The ranks that carry out one collective, and how this one reaches the others."""

    # All that take part, in the order of their positions except that the root has position 0.
    ranks: Sequence[int]
    # This rank, one of them.
    rank: int
    # One of them.
    root: int
    # Sends and receives.
    point_to_point: PointToPoint
    # Of the messages, in [0, 2**15); different for collectives that may be under way at once.
    tag: int = 0

    @property
    def position(self) -> int:
        """This rank's position."""
        return (self.ranks.index(self.rank) - self.ranks.index(self.root)) % len(self.ranks)

    def rank_at(self, position: int) -> int:
        """Return the rank at a position."""
        return self.ranks[(position + self.ranks.index(self.root)) % len(self.ranks)]

    def start(self, way: str, buffer: np.ndarray[Any, Any], position: int) -> Any:
        """Start to receive a buffer "from" a position, or to send it "to" one.

        Returns:
            The request, for `wait_any`.
        """
        begin = self.point_to_point.receive if way == "from" else self.point_to_point.send
        return begin(buffer, self.rank_at(position), self.tag)

    def wait_any(self, requests: list[Any]) -> int:
        """Wait until one of the requests is done; return its position in the list."""
        return self.point_to_point.wait_any(requests)


# (the moves of one position, the vector that they change, who takes part)
RunMoves = Callable[[Sequence[Move], "np.ndarray[Any, Any]", Participants], None]


def carry_out(
    operation: str,
    array: np.ndarray[Any, Any],
    participants: Participants,
    schedule: Schedule,
    run_moves: RunMoves,
    block: int = 16384,
) -> np.ndarray[Any, Any]:
    """Carry out one broadcast, reduce or allreduce.

    Args:
        operation: one of OPERATIONS.
        array: one-dimensional, of any length, the same length and dtype on every rank; not changed.
        participants: the ranks, the same on each of them except for `rank`.
        schedule: says which message is sent when.
        run_moves: `run_by_round` or `run_when_ready`.
        block: entries of a block, >= 1.

    Returns:
        "broadcast": the root's vector on all ranks; "reduce": the sum on the root, elsewhere the
        own vector; "allreduce": the sum on all, with the same bits.

    **Ranks:** all participants.
    **Raises:** PlanError for an unknown operation or a root that does not take part.
    """
    check_name("operation", operation, OPERATIONS)
    ranks, root = participants.ranks, participants.root
    if root not in ranks:
        raise PlanError(
            f"The root of a {operation} must take part. Received root={root}, "
            f"ranks={list(ranks)} (rank {participants.rank})."
        )
    result, position = array.copy(), participants.position
    if len(ranks) > 1 and len(array):
        moves = own_moves(schedule, operation, len(ranks), len(array), block, position)
        run_moves(moves, result, participants)
    return array.copy() if operation == "reduce" and position else result


@functools.lru_cache(maxsize=256)
def own_moves(
    schedule: Schedule, operation: str, positions: int, entries: int, block: int, position: int
) -> tuple[Move, ...]:
    """Return the moves of one position, the same ones every step, in messages of at most a block.

    Two long messages that meet on a link wait for each other in Open MPI's TCP: short ones use both
    directions.
    """
    return tuple(
        move._replace(start=start, stop=min(start + block, move.stop))
        for move in schedule(operation, positions, entries, block)
        if position in (move.source, move.target)
        for start in range(move.start, move.stop, block)
    )


def run_by_round(
    moves: Sequence[Move], vector: np.ndarray[Any, Any], participants: Participants
) -> None:
    """Run the moves of one position, round after round; within a round it sends and receives.

    Needs a schedule in which no position sends in a round what it receives in the same one.
    """
    for _, now in itertools.groupby(moves, key=lambda move: move.round):
        run_when_ready(list(now), vector, participants)


def run_when_ready(
    moves: Sequence[Move], vector: np.ndarray[Any, Any], participants: Participants
) -> None:
    """Run the moves of one position as soon as their data are there.

    Neither directions nor rounds wait for each other. A block is sent when all moves that bring it
    in earlier rounds have come, and what comes is applied in the order of the rounds, so that sums
    are the same every time. Blocks to one position are sent in the order of their rounds, in which
    they are awaited there. Needs a schedule that cuts the vector into the same blocks for all
    moves.

    **Cost:** one copy of each block that is sent, because the vector goes on changing meanwhile.
    """
    queues = _Queues(moves, vector, participants)
    queues.start_what_is_ready()
    while queues.finish_one():
        queues.start_what_is_ready()


class _UnderWay(NamedTuple):
    request: Any
    move: Move
    # Must live until the request is done.
    buffer: np.ndarray[Any, Any]


class _Queues:
    """The moves of one position: waiting, under way, and come before their turn.

    The turn of a move is the number of moves that must have brought the same block before.
    """

    def __init__(
        self, moves: Sequence[Move], vector: np.ndarray[Any, Any], participants: Participants
    ) -> None:
        self.vector, self.participants = vector, participants
        self.position = participants.position
        # ("from" or "to", other position) -> moves that are not under way yet, in order
        self.waiting: dict[tuple[str, int], deque[Move]] = {}
        self.turn: dict[Move, int] = {}
        awaited: Counter[int] = Counter()  # Moves by the start of the block that they bring
        for move in moves:
            comes = move.target == self.position
            line = ("from", move.source) if comes else ("to", move.target)
            self.waiting.setdefault(line, deque()).append(move)
            self.turn[move] = awaited[move.start]
            awaited[move.start] += comes
        self.under_way: dict[tuple[str, int], deque[_UnderWay]] = {
            line: deque() for line in self.waiting
        }
        self.came: Counter[int] = Counter()  # As `awaited`: moves that have been applied
        # (start of a block, turn) -> what has come before its turn
        self.early: dict[tuple[int, int], tuple[Move, np.ndarray[Any, Any]]] = {}

    def start_what_is_ready(self) -> None:
        """Start every move whose data are there, up to WINDOW in each direction."""
        for (way, other), queue in self.waiting.items():
            line = self.under_way[way, other]
            while queue and len(line) < WINDOW and (way == "from" or self._has_come(queue[0])):
                move = queue.popleft()
                part = self.vector[move.start : move.stop]
                buffer = np.empty_like(part) if way == "from" else part.copy()
                request = self.participants.start(way, buffer, other)
                line.append(_UnderWay(request, move, buffer))

    def finish_one(self) -> bool:
        """Wait for one move and apply what can be applied; False if none is under way."""
        fronts = [line for line in self.under_way.values() if line]
        if not fronts:
            return False
        done = self.participants.wait_any([line[0].request for line in fronts])
        _, move, buffer = fronts[done].popleft()
        if move.target == self.position:
            self.early[move.start, self.turn[move]] = move, buffer
            while ready := self.early.pop((move.start, self.came[move.start]), None):
                _apply(*ready, self.vector)
                self.came[move.start] += 1
        return True

    def _has_come(self, move: Move) -> bool:
        return self.turn[move] <= self.came[move.start]


def _apply(move: Move, buffer: np.ndarray[Any, Any], vector: np.ndarray[Any, Any]) -> None:
    part = vector[move.start : move.stop]
    if move.add:
        np.add(part, buffer, out=part)
    else:
        part[...] = buffer
