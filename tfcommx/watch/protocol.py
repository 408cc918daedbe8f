"""Messages and decisions of one watcher, without sockets and clock, so that tests simulate many.

    lines between watchers     .            alive
                               bye          the rank ends in order; its watcher continues
                               ended        to the parent: all ranks below have ended
                               over         to the children: all ranks have ended
                               lost JSON    missing ranks: rank -> [host, event, noticing rank]
                               left N       rank N has ended while others may continue without it
                               at JSON      to the parent: activity of the ranks below (stalls.py)
                               stall JSON   to the children: ranks that wait for others
                               end JSON     the same, for longer than the limit: all end

    lines from the rank        bye, aborted, failed: ..., at JSON, needs JSON or all
    lines to the rank          lost TEXT, gone JSON, stall TEXT, end TEXT

A watcher sends "." while its rank's process exists and is not stopped. It raises the alarm if it
has received none from a neighbour for `limit` seconds, or at once if a neighbour's connection ends
without a bye. A watcher forwards each new alarm to all neighbours. The death of a neighbour does
not stop an alarm, because each of its other neighbours notices the death, too.

While ranks may leave (membership.py), only the loss of a needed rank is an alarm; `gone` informs
each rank of the others, also when they end in order. At other times `early` names a neighbour that
has ended in order, for the error of a rank that waited for it.

A watcher whose rank has ended in order forwards messages until all ranks have ended.

To add a fault, detect it and call `_learn_missing`; the alarm that follows is the same for all
faults. watcher.py observes this rank's process (`_state_of`), liveness.py reports its exceptions
(`fail`), and this file judges the neighbours (`broken`, `_report_silent`). liveness.py has the
table of faults; `tests/watch/test_faults.py` causes them.

**Cost:** per beat one message of 2 bytes to each neighbour and one to the parent; per alarm at most
NAMES ranks to each neighbour.

At most 7 watchers are connected to each, for any number of ranks, by a tree with 4 children per
rank, and a ring, which keeps the ranks below a dead rank connected with the others.

    0 --+-- 1 --+-- 5        tree: the parent of r is (r - 1) // 4
        |       +-- 6
        |       +-- 7        ring: 0 -- 1 -- 2 -- ... -- p-1 -- 0
        |       +-- 8
        +-- 2 --+-- 9 ...
        +-- 3
        +-- 4

`Alarm` is the alarm of one watcher, from the first sign to the end of its rank:

    first sign -- GATHER_SECONDS --> the rank is told -- LAST_WORDS_SECONDS --> it is killed

A rank that Gloo has aborted is not the cause, so a watcher has CAUSE_SECONDS to name the cause.
Ranks of a node that die together are named together. A rank that ends after this rank was told is
not added, because it ends due to the alarm.
"""

import json
import math
from collections.abc import Collection
from typing import Any

from tfcommx.watch.stalls import DOINGS, ENDED, UNKNOWN, Group, StallWatch, group_of, later, merge

CHILDREN = 4
Missing = tuple[str, str, int]  # Host, event, and the rank that has noticed it


def parent(rank: int) -> int | None:
    """Return the rank above in the tree; None for rank 0."""
    return (rank - 1) // CHILDREN if rank else None


def children(rank: int, size: int) -> list[int]:
    """Return the ranks below in the tree."""
    first = CHILDREN * rank + 1
    return list(range(first, min(first + CHILDREN, size)))


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks whose watchers this rank's watcher is connected to, ascending.

    >>> neighbours(0, 2), neighbours(1, 100), neighbours(99, 100)
    ([1], [0, 2, 5, 6, 7, 8], [0, 24, 98])
    """
    ring = {(rank - 1) % size, (rank + 1) % size}
    above = parent(rank) or 0  # For rank 0 itself, which has no parent
    return sorted({above, *children(rank, size), *ring} - {rank})


# Seconds from the first sign until the rank is told
GATHER_SECONDS = 0.3
# Seconds that the rank has to end, before it is killed
LAST_WORDS_SECONDS = 8.0
# Seconds from the first sign until the rank is told, while only aborted ranks are missing
CAUSE_SECONDS = 3.0
# Event of a rank that an exception of native code ended: nearly always one of Gloo's
ABORTED = "aborted, as Gloo does if it loses its connection to another rank"
# Limit on the missing ranks that one alarm names
NAMES = 8
# Last line of a rank that ends because of others, written by the rank or its watcher
MISSING = (
    "tfcommx: rank {rank} ends, because ranks are missing: {text} Start again from the last "
    "checkpoint.\n"
)
# Line of the watcher of a rank that failed; launch/rank_output.py reads it
KILLED = "tfcommx: rank {rank} has failed, and is killed, because it has not ended.\n"


class Alarm:
    """The missing ranks that one watcher knows.

    Args:
        rank: the watched rank.
        neighbours: ranks of the connected watchers.
    """

    def __init__(self, rank: int, neighbours: Collection[int]) -> None:
        self._rank, self._neighbours = rank, set(neighbours)
        # Missing rank -> (host, event, noticing rank)
        self.lost: dict[int, Missing] = {}
        # True once the rank was told; time at which it is killed
        self.told = False
        self.kill_at: float | None = None
        # Times of the first missing rank, and of the first that was not aborted
        self._first_at = self._cause_at = math.inf

    def add(self, reported: dict[int, Missing], time_now: float) -> dict[int, Missing]:
        """Record missing ranks; return the new ones: none once the rank was told."""
        if self.told:
            return {}
        # The known ones first, and with their first event
        candidates = {**self.lost, **reported, **self.lost}
        # Aborted ranks are not the cause, so that of more than NAMES they are left out
        in_order = sorted(candidates, key=lambda rank: candidates[rank][1] == ABORTED)
        named = {rank: candidates[rank] for rank in in_order[:NAMES]}
        added = {rank: row for rank, row in named.items() if rank not in self.lost}
        if added:
            self._first_at = min(self._first_at, time_now)
        if any(event != ABORTED for _, event, _ in added.values()):
            self._cause_at = min(self._cause_at, time_now)
        self.lost = named
        return added

    def is_due(self, time_now: float) -> bool:
        """Return True if the rank must now be told."""
        tell_at = min(self._cause_at + GATHER_SECONDS, self._first_at + CAUSE_SECONDS)
        return not self.told and time_now >= tell_at

    def set_told(self, time_now: float, stopped: bool) -> None:
        self.told = True
        # A stopped process can say no last words
        self.kill_at = time_now + (0 if stopped else LAST_WORDS_SECONDS)

    def sentence(self, ranks: Collection[int]) -> str:
        """Return a sentence that names these missing ranks and the ranks that noticed."""
        names = ", ".join(
            f"rank {rank} on {self.lost[rank][0]} ({self.lost[rank][1]})" for rank in sorted(ranks)
        )
        more = " At least these." if len(self.lost) == NAMES else ""
        by = sorted({by for _, _, by in self.lost.values()} - {self._rank} - set(self.lost))
        noticed = f" Noticed by rank {', '.join(map(str, by[:3]))}." if by else ""
        alone = self._neighbours <= set(self.lost) and len(self._neighbours) > 1
        cut = " No neighbour of this rank responds: it may have been cut off." if alone else ""
        return f"{names}.{more}{noticed}{cut}"


class Neighbour:
    """Another watcher, as this one sees it."""

    def __init__(self, host: str, time_now: float) -> None:
        self.host, self.connected, self.heard = host, False, time_now
        # True once its rank has said bye, and once all ranks from it down have
        self.leaving, self.ended = False, False
        # Activity of the ranks from it down, and the time of its last report
        self.groups: list[Group] = []
        self.groups_at = time_now

    @property
    def gone(self) -> bool:
        """True if it has left after a bye."""
        return self.leaving and not self.connected


def read_line(line: str, size: int) -> tuple[str, Any]:
    """Return kind and content of a line between watchers of `size` ranks.

    **Raises:** ValueError, TypeError or LookupError for a line that no watcher writes.

    >>> read_line('lost {"3": ["node1", "its process has ended", 2]}', 4)
    ('lost', {3: ('node1', 'its process has ended', 2)})
    """
    kind, _, text = line.partition(" ")
    content: Any = json.loads(text) if text else None
    if kind == "lost":
        rows = dict(content).items()
        content = {int(rank): (host, event, by) for rank, (host, event, by) in rows}
        ranks = [*content, *(by for _, _, by in content.values())]
        right = all(isinstance(word, str) for row in content.values() for word in row[:2])
    elif kind == "at":
        content = [Group(*row) for row in content]
        ranks = [rank for group in content for rank in group.ranks]
        right = all(
            type(group.step) is type(group.size) is int
            and group.doing in DOINGS
            and isinstance(group.what, str)
            and group.ranks
            and isinstance(group.seconds, int | float)
            for group in content
        )
    elif kind == "left":
        ranks, right = [content], True
    else:
        ranks, right = [], isinstance(content, str if kind in ("stall", "end") else type(None))
    # Not isinstance, because it takes JSON's true for a number
    if not right or not all(type(rank) is int and 0 <= rank < size for rank in ranks):
        raise ValueError(f"no line of a watcher: {line!r:.80}")
    return kind, content


class WatchProtocol:
    """The state of one watcher. The caller sends the lines in `outbox` and `to_rank`.

    Args:
        job: rank, size, host, limit (seconds of silence); hosts, of `neighbours`, in that order;
            stall_seconds and stall_limit, as StallWatch takes them.
        time_now: seconds on a monotonic clock; as in all methods.
    """

    def __init__(self, job: dict[str, Any], time_now: float) -> None:
        self.rank, self.size = job["rank"], job["size"]
        self.host, self.limit = job["host"], job["limit"]
        peers = neighbours(self.rank, self.size)
        self.neighbours = {
            peer: Neighbour(host, time_now) for peer, host in zip(peers, job["hosts"], strict=True)
        }
        self.parent = parent(self.rank)
        self.children = children(self.rank, self.size)
        # (rank of the neighbour, line), and lines for this rank's process
        self.outbox: list[tuple[int, str]] = []
        self.to_rank: list[str] = []
        self.alarm = Alarm(self.rank, peers)
        # True once this rank has said bye; while its process is stopped; once it has ended
        self.leaving, self.stopped, self.gone = False, False, False
        # True if the watcher must report for the rank, which could not; if the rank was aborted
        self._speaks_for_rank, self._aborted = False, False
        # True once the parent knows that all have ended here and below; once all ranks have ended
        self.said_ended, self.over = False, False
        self.group, self.group_since = group_of(self.rank, 0, UNKNOWN, ""), time_now
        # Ranks whose loss is an alarm; None: all
        self.needed: set[int] | None = None
        # Rank that has left while others continue -> True if it ended in order
        self.left: dict[int, bool] = {}
        self.stalls = StallWatch(job["stall_seconds"], job["stall_limit"])

    @property
    def finished(self) -> bool:
        """True if the watcher has no more work."""
        # A rank that died without an alarm was allowed to leave, and has nothing to forward
        return self.gone and (
            self.over or self.alarm.told or (not self.leaving and not self.alarm.lost)
        )

    def connected(self, peer: int, time_now: float) -> None:
        """Record a connection to a neighbour, and send it the current state."""
        neighbour = self.neighbours[peer]
        # Lines to a neighbour without a connection are dropped, so it needs the present state
        neighbour.connected, neighbour.heard = True, time_now
        if not self.stopped:
            self.outbox.append((peer, "."))
        if self.leaving:
            self.outbox.append((peer, "bye"))
        if self.said_ended and peer == self.parent:
            self.outbox.append((peer, "ended"))
        if self.alarm.lost:
            self.outbox.append((peer, f"lost {json.dumps(self.alarm.lost)}"))

    def broken(self, peer: int, event: str, time_now: float) -> None:
        """Record that a neighbour's connection has ended; `event` describes how, for messages."""
        neighbour = self.neighbours[peer]
        neighbour.connected = False
        # A watcher that was killed after its rank's bye sends no `ended`; others would wait
        if neighbour.leaving:
            self._see_whether_all_ended()
        else:
            self._report_missing(peer, event, time_now)

    def received(self, peer: int, line: str, time_now: float) -> None:
        """Process a neighbour's line; ignore one that no watcher writes."""
        neighbour = self.neighbours[peer]
        try:
            kind, content = read_line(line, self.size)
        except (ValueError, TypeError, LookupError, RecursionError):
            return
        if kind == ".":  # Not other lines, because the watcher of a stopped rank sends them, too
            neighbour.heard = time_now
        elif kind == "bye":
            neighbour.leaving = True
            if self.needed is not None:
                self._leave(peer, "it has ended", None)
            else:  # Not forwarded: a rank that is still needed is named by its neighbours
                self.to_rank.append(f"early {peer}")
        elif kind == "left":
            self._leave(content, "it has ended", peer)
        elif kind == "ended":
            neighbour.ended = True
            self._see_whether_all_ended()
        elif kind == "over":
            self._pass_over()
        elif kind == "lost":
            self._learn_missing(content, peer, time_now)
        elif kind == "at":
            neighbour.groups, neighbour.groups_at = content, time_now
        elif kind == "stall":
            self._pass_down(content)
        elif kind == "end":
            self._end(content, peer, time_now)

    def rank_says(self, line: str, time_now: float) -> None:
        """Process a line of the watched rank."""
        kind, _, text = line.partition(" ")
        if kind == "at":
            self.group, self.group_since = group_of(self.rank, *json.loads(text)), time_now
        elif kind == "needs":
            self.needed = None if text == "all" else set(json.loads(text))
        elif kind == "bye":
            self.leaving = True
            self.group, self.group_since = group_of(self.rank, 0, ENDED, ""), time_now
            self._say_to_all("bye")
            self._see_whether_all_ended()
        elif kind == "aborted":
            self._aborted = True
        elif line:
            self._learn_missing({self.rank: (self.host, line, self.rank)}, None, time_now)

    def rank_is_gone(self, time_now: float) -> None:
        """Record the end of this rank's process; report it if the rank has not itself."""
        self.gone = True
        if not (self.leaving or self.alarm.told or self.rank in self.alarm.lost):
            self._speaks_for_rank = True
            event = ABORTED if self._aborted else "its process has ended"
            self._learn_missing({self.rank: (self.host, event, self.rank)}, None, time_now)

    @property
    def last_words(self) -> str:
        """Message in place of a rank that has ended; empty if it was the first to end."""
        lost = self.alarm.lost
        causes = [rank for rank, (_, event, _) in lost.items() if event != ABORTED]
        if not self._speaks_for_rank or (causes[:1] == [self.rank] and not self._aborted):
            return ""
        missing = lost.keys() - {self.rank}
        return self.alarm.sentence(missing) if missing else "which, no watcher has said."

    @property
    def has_failed(self) -> bool:
        """True if this rank has reported an exception."""
        return self.alarm.lost.get(self.rank, ("", "", 0))[1].startswith("failed: ")

    def beat(self, time_now: float, late: float = 0.0) -> None:
        """Send a sign of life and the activity from here down; report silent neighbours.

        Args:
            time_now: seconds on a monotonic clock.
            late: seconds that this process could not run, >= 0. They do not count as silence,
                because it received nothing in that time.
        """
        for neighbour in self.neighbours.values():
            neighbour.heard = min(time_now, neighbour.heard + late)
        if not self.stopped:
            self._say_to_all(".")
        if any(
            not neighbour.leaving and time_now - neighbour.heard > self.limit
            for neighbour in self.neighbours.values()
        ):
            self._report_silent(time_now)
        if self.stalls.on and not self.alarm.told:
            self._tell_what_ranks_do(time_now)

    def tell_if_due(self, time_now: float) -> None:
        """Tell the rank of a due alarm. Call it after each event, and often."""
        if self.alarm.is_due(time_now):
            self._tell_rank(f"lost {self.alarm.sentence(self.alarm.lost)}", time_now)

    # --- the alarm ----------------------------------------------------------------------

    def _report_silent(self, time_now: float) -> None:
        # Half the limit, because ranks that died together should be named together
        for peer, neighbour in self.neighbours.items():
            silent_s = time_now - neighbour.heard
            if neighbour.leaving or silent_s <= self.limit / 2:
                continue
            event = f"no response for {silent_s:.0f} s"
            if not neighbour.connected:
                event += ", and no connection: does a firewall close the ports between the hosts?"
            self._report_missing(peer, event, time_now)

    def _report_missing(self, peer: int, event: str, time_now: float) -> None:
        self._learn_missing({peer: (self.neighbours[peer].host, event, self.rank)}, None, time_now)

    def _learn_missing(
        self, reported: dict[int, Missing], source: int | None, time_now: float
    ) -> None:
        """Record missing ranks, and forward the new ones."""
        first = not self.alarm.lost
        if new := self.alarm.add(self._set_departed_aside(reported, source), time_now):
            self._pass_on(f"lost {json.dumps(new)}", source)
            if first:
                self._report_silent(time_now)

    def _set_departed_aside(
        self, reported: dict[int, Missing], source: int | None
    ) -> dict[int, Missing]:
        """Record missing ranks that may leave; return the others."""
        relevant = {rank: row for rank, row in reported.items() if rank not in self.left}
        if self.needed is None:
            return relevant
        # This rank, too, because a rank that the others have given up must end
        needed = self.needed | {self.rank}
        for rank in relevant.keys() - needed:
            host, event, _ = relevant[rank]
            self.left[rank] = False
            self.to_rank.append(f"gone {json.dumps([rank, f'on {host}: {event}', False])}")
            self._pass_on(f"lost {json.dumps({rank: relevant[rank]})}", source)
            self._see_whether_all_ended()
        return {rank: row for rank, row in relevant.items() if rank in needed}

    def _leave(self, rank: int, event: str, source: int | None) -> None:
        # Once, because neighbours of a ring would forward it to each other without end
        if rank not in self.left:
            self.left[rank] = True
            self.to_rank.append(f"gone {json.dumps([rank, event, True])}")
            self._pass_on(f"left {rank}", source)

    def _tell_rank(self, line: str, time_now: float) -> None:
        self.to_rank.append(line)
        self.alarm.set_told(time_now, self.stopped)

    # --- the end ------------------------------------------------------------------------

    def _see_whether_all_ended(self) -> None:
        if not self.leaving or not all(
            self.neighbours[child].ended or self._is_gone(child) for child in self.children
        ):
            return
        if self.parent is None or self._is_gone(self.parent):
            self._pass_over()
        elif not self.said_ended:
            self.said_ended = True
            self.outbox.append((self.parent, "ended"))

    def _is_gone(self, peer: int) -> bool:
        return self.neighbours[peer].gone or self.left.get(peer) is False

    def _pass_over(self) -> None:
        self.over = True
        for child in self.children:
            self.outbox.append((child, "over"))

    # --- stalls -------------------------------------------------------------------------

    def _tell_what_ranks_do(self, time_now: float) -> None:
        """Send the activity from here down to the parent; rank 0 looks for stalls."""
        groups = later([self.group], time_now - self.group_since)
        for child in self.children:
            neighbour = self.neighbours[child]
            # A dead child's last report would age forever, and look like a stall
            if self.left.get(child) is False:
                continue
            groups += later(neighbour.groups, time_now - neighbour.groups_at)
        # Before they are sent, because messages must not grow with the ranks
        groups = merge(groups)
        if self.parent is not None:
            self.outbox.append((self.parent, f"at {json.dumps(groups)}"))
            return
        kind, text = self.stalls.look(groups)
        if kind == "stall":
            self._pass_down(text)
        elif kind == "end":
            self._end(text, None, time_now)

    def _pass_down(self, text: str) -> None:
        self.to_rank.append(f"stall {text}")
        for child in self.children:
            self.outbox.append((child, f"stall {json.dumps(text)}"))

    def _end(self, text: str, source: int | None, time_now: float) -> None:
        if self.alarm.told:
            return
        self._pass_on(f"end {json.dumps(text)}", source)
        self._tell_rank(f"end {text}", time_now)

    def _pass_on(self, line: str, source: int | None) -> None:
        self.outbox += [(peer, line) for peer in self.neighbours if peer != source]

    def _say_to_all(self, line: str) -> None:
        self.outbox += [
            (peer, line) for peer, neighbour in self.neighbours.items() if neighbour.connected
        ]
