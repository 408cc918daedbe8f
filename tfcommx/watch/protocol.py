"""What one watcher says and decides: no sockets and no clock, so that thousands can be simulated.

    lines between watchers     .            alive
                               bye          the rank ends as it should; its watcher stays
                               ended        to the parent: all ranks below have ended
                               over         to the children: all ranks have ended
                               lost JSON    which ranks are missing: rank -> [host, what, by whom]
                               left N       rank N has ended while others may go on without it
                               at JSON      to the parent: what the ranks below do (stalls.py)
                               stall JSON   to the children: who waits for whom
                               end JSON     the same, and it has lasted too long: all end

    lines from the rank        bye, aborted, failed: ..., at JSON, needs JSON or all
    lines to the rank          lost TEXT, gone JSON, stall TEXT, end TEXT

A watcher says "alive" while its rank's process exists and is not stopped. It raises the alarm if it
has heard nothing of a neighbour for `limit` seconds, or at once if a neighbour's connection ends
without a bye. Who hears an alarm for the first time passes it on to all neighbours. A neighbour
that dies does not stop it: each of its other neighbours notices the death itself.

While ranks may leave (membership.py), only the loss of a rank that is needed is an alarm; of the
others each rank is told by `gone`, also when they end in order.

A watcher whose rank has ended in order still passes on what it hears, until all ranks have ended.

To add a fault: whoever notices it calls `_learn_missing`, from which on an alarm is the same for
all. This rank's process is looked at in watcher.py (`_state_of`), its exceptions are told by
liveness.py (`fail`), neighbours are judged here (`broken`, `_report_silent`). liveness.py has the
table of faults for people; `tests/watch/test_faults.py` makes them happen.

**Cost:** per beat one message of 2 bytes to each neighbour and one to the parent; per alarm at most
NAMES ranks to each neighbour.

At most 7 watchers are connected to each, however many ranks there are, by a tree with 4 children to
a rank, and a ring, which keeps what is below a dead rank connected with the rest.

    0 --+-- 1 --+-- 5        tree: the parent of r is (r - 1) // 4
        |       +-- 6
        |       +-- 7        ring: 0 -- 1 -- 2 -- ... -- p-1 -- 0
        |       +-- 8
        +-- 2 --+-- 9 ...
        +-- 3
        +-- 4

`Alarm` is that of one watcher, from the first sign to the end of its rank:

    first sign -- GATHER_SECONDS --> the rank is told -- LAST_WORDS_SECONDS --> it is killed

A rank that Gloo has aborted is no cause: CAUSE_SECONDS are left for a watcher to name one.

What ranks of a node that die together have in common is named together; what ends after the rank
was told ends because of the alarm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

from tfcommx.watch.stalls import DOINGS, ENDED, UNKNOWN, Group, StallWatch, group_of, later, merge

CHILDREN = 4
Missing = tuple[str, str, int]  # Host, what has happened, and the rank that has noticed it


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
    above = [(rank - 1) // CHILDREN] if rank else []
    return sorted({*above, *children(rank, size), (rank - 1) % size, (rank + 1) % size} - {rank})


# From the first sign to what the rank is told
GATHER_SECONDS = 0.3
# For the rank to end by itself, before it is killed
LAST_WORDS_SECONDS = 8.0
# From the first sign to what the rank is told, while only ranks that were aborted are missing
CAUSE_SECONDS = 3.0
# What is said of a rank that an exception of native code ended: nearly always one of Gloo's
ABORTED = "aborted, as Gloo does if it loses its connection to another rank"
# Missing ranks that one alarm names
NAMES = 8
# What a rank says before it ends because of others, or its watcher in its place
MISSING = (
    "tfcommx: rank {rank} ends, because ranks are missing: {text} Start again from the last "
    "checkpoint.\n"
)


class Alarm:
    """What one watcher knows of missing ranks.

    Args:
        rank: whose watcher it is.
        neighbours: ranks whose watchers it is connected to.
    """

    def __init__(self, rank: int, neighbours: Collection[int]) -> None:
        self._rank, self._neighbours = rank, set(neighbours)
        # Missing rank -> [host, what, by whom]
        self.lost: dict[int, Missing] = {}
        # Whether the rank was told; when it is killed
        self.told = False
        self.kill_at: float | None = None
        # When the first missing rank was known, and the first that was not aborted
        self._first_at = self._cause_at = math.inf

    def add(self, found: dict[int, Missing], now: float) -> dict[int, Missing]:
        """Take note of missing ranks; return those that are new: none once the rank was told.

        Of more than NAMES those that were aborted are left out first: they are no cause.
        """
        if self.told:
            return {}
        whole = {**self.lost, **found, **self.lost}
        in_order = sorted(whole, key=lambda rank: whole[rank][1] == ABORTED)
        kept = {rank: whole[rank] for rank in in_order[:NAMES]}
        added = {rank: row for rank, row in kept.items() if rank not in self.lost}
        if added:
            self._first_at = min(self._first_at, now)
        if any(what != ABORTED for _, what, _ in added.values()):
            self._cause_at = min(self._cause_at, now)
        self.lost = kept
        return added

    def is_due(self, now: float) -> bool:
        """Tell whether the rank must now be told."""
        tell_at = min(self._cause_at + GATHER_SECONDS, self._first_at + CAUSE_SECONDS)
        return not self.told and now >= tell_at

    def set_told(self, now: float, stopped: bool) -> None:
        """Take note that the rank was told; one whose process is stopped cannot end by itself."""
        self.told = True
        self.kill_at = now + (0 if stopped else LAST_WORDS_SECONDS)

    def sentence(self, ranks: Collection[int]) -> str:
        """Say which of these ranks are missing, and who has noticed."""
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

    def __init__(self, host: str, now: float) -> None:
        self.host, self.connected, self.heard = host, False, now
        # Its rank has said bye; all ranks below it have
        self.leaving, self.ended = False, False
        # What the ranks below it do, and when it said so
        self.groups: list[Group] = []
        self.groups_at = now

    @property
    def gone(self) -> bool:
        """Whether it has left after a bye."""
        return self.leaving and not self.connected


def read_line(line: str, size: int) -> tuple[str, Any]:
    """Return kind and content of a line between watchers of so many ranks.

    **Raises:** ValueError, TypeError or LookupError for a line that no watcher writes.

    >>> read_line('lost {"3": ["node1", "its process has ended", 2]}', 4)
    ('lost', {3: ('node1', 'its process has ended', 2)})
    """
    kind, _, text = line.partition(" ")
    content: Any = json.loads(text) if text else None
    if kind == "lost":
        rows = dict(content).items()
        content = {int(rank): (host, what, by) for rank, (host, what, by) in rows}
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
    if not right or not all(type(rank) is int and 0 <= rank < size for rank in ranks):
        raise ValueError(f"no line of a watcher: {line!r:.80}")
    return kind, content


class WatchProtocol:
    """The state of one watcher. Whoever drives it sends what it puts into `outbox` and `to_rank`.

    Args:
        job: rank, size, host, limit (seconds of silence); hosts, of `neighbours`, in that order;
            stall_seconds and stall_limit, as StallWatch takes them.
        now: seconds, on a clock that never goes back; as in all methods.
    """

    def __init__(self, job: dict[str, Any], now: float) -> None:
        self.rank, self.size = job["rank"], job["size"]
        self.host, self.limit = job["host"], job["limit"]
        others = neighbours(self.rank, self.size)
        self.neighbours = {
            other: Neighbour(host, now) for other, host in zip(others, job["hosts"], strict=True)
        }
        self.parent = parent(self.rank)
        self.children = children(self.rank, self.size)
        # (neighbour, line), and lines for this rank's process
        self.outbox: list[tuple[int, str]] = []
        self.to_rank: list[str] = []
        self.alarm = Alarm(self.rank, others)
        # This rank has said bye; its process is stopped; it is gone
        self.leaving, self.stopped, self.gone = False, False, False
        # The watcher says for the rank, which could not, why it has ended; the rank was aborted
        self._speaks_for_rank, self._aborted = False, False
        # The parent knows that all have ended here and below; all ranks have ended
        self.said_ended, self.over = False, False
        self.group, self.group_since = group_of(self.rank, 0, UNKNOWN, ""), now
        # Ranks whose loss is an alarm; None: all
        self.needed: set[int] | None = None
        # Ranks that have left while others go on -> whether they ended in order
        self.left: dict[int, bool] = {}
        self.stalls = StallWatch(job["stall_seconds"], job["stall_limit"])

    @property
    def finished(self) -> bool:
        """Whether the watcher has nothing to do any more."""
        return self.gone and (
            self.over or self.alarm.told or (not self.leaving and not self.alarm.lost)
        )

    def connected(self, other: int, now: float) -> None:
        """Take note of a connection to a neighbour."""
        one = self.neighbours[other]
        one.connected, one.heard = True, now
        if not self.stopped:
            self.outbox.append((other, "."))
        if self.leaving:
            self.outbox.append((other, "bye"))
        if self.said_ended and other == self.parent:
            self.outbox.append((other, "ended"))
        if self.alarm.lost:
            self.outbox.append((other, f"lost {json.dumps(self.alarm.lost)}"))

    def disconnected(self, other: int) -> None:
        """Take note that the connection to a neighbour never worked."""
        self.neighbours[other].connected = False

    def broken(self, other: int, what: str, now: float) -> None:
        """Take note that a neighbour's connection has ended; `what` says how, for people."""
        one = self.neighbours[other]
        one.connected = False
        if one.leaving:
            self._see_whether_all_ended()
        else:
            self._report_missing(other, what, now)

    def received(self, other: int, line: str, now: float) -> None:
        """Take a neighbour's line in; one that no watcher writes is passed over."""
        one = self.neighbours[other]
        try:
            kind, content = read_line(line, self.size)
        except (ValueError, TypeError, LookupError, RecursionError):
            return
        if kind == ".":  # The other lines come from the watcher, also of a rank that is stopped
            one.heard = now
        elif kind == "bye":
            one.leaving = True
            if self.needed is not None:
                self._leave(other, "it has ended", None)
        elif kind == "left":
            self._leave(content, "it has ended", other)
        elif kind == "ended":
            one.ended = True
            self._see_whether_all_ended()
        elif kind == "over":
            self._pass_over()
        elif kind == "lost":
            self._learn_missing(content, other, now)
        elif kind == "at":
            one.groups, one.groups_at = content, now
        elif kind == "stall":
            self._pass_down(line)
        elif kind == "end":
            self._end(line, other, now)

    def rank_says(self, line: str, now: float) -> None:
        """Take in what this watcher's own rank says."""
        kind, _, text = line.partition(" ")
        if kind == "at":
            self.group, self.group_since = group_of(self.rank, *json.loads(text)), now
        elif kind == "needs":
            self.needed = None if text == "all" else set(json.loads(text))
        elif kind == "bye":
            self.leaving = True
            self.group, self.group_since = group_of(self.rank, 0, ENDED, ""), now
            self._say_to_all("bye")
            self._see_whether_all_ended()
        elif kind == "aborted":
            self._aborted = True
        elif line:
            self._learn_missing({self.rank: (self.host, line, self.rank)}, None, now)

    def rank_is_gone(self, now: float) -> None:
        """Take note that this rank's process has ended, and tell the others if it said nothing.

        Gloo aborts ranks whose neighbour has died before they can say why.
        """
        self.gone = True
        if not (self.leaving or self.alarm.told or self.rank in self.alarm.lost):
            self._speaks_for_rank = True
            what = ABORTED if self._aborted else "its process has ended"
            self._learn_missing({self.rank: (self.host, what, self.rank)}, None, now)

    @property
    def last_words(self) -> str:
        """What is said in the place of a rank that is gone; empty if it was the first to go."""
        lost = self.alarm.lost
        causes = [rank for rank, (_, what, _) in lost.items() if what != ABORTED]
        if not self._speaks_for_rank or (causes[:1] == [self.rank] and not self._aborted):
            return ""
        others = lost.keys() - {self.rank}
        return self.alarm.sentence(others) if others else "which, no watcher has said."

    def beat(self, now: float, late: float = 0.0) -> None:
        """Say that the rank is alive, what it and those below do, and look who is silent.

        Args:
            now: seconds.
            late: seconds that this process was itself kept from running: it knows nothing of the
                others in that time.
        """
        for one in self.neighbours.values():
            one.heard = min(now, one.heard + late)
        if not self.stopped:
            self._say_to_all(".")
        self._report_silent(now)
        if self.stalls.on and not self.alarm.told:
            self._tell_what_ranks_do(now)

    def tell_if_due(self, now: float) -> None:
        """Do what is due: tell the rank of the alarm. Call it after each event, and often."""
        if self.alarm.is_due(now):
            self._tell_rank(f"lost {self.alarm.sentence(self.alarm.lost)}", now)

    # --- the alarm ----------------------------------------------------------------------

    def _report_silent(self, now: float) -> None:
        """Find the neighbours that have been silent for too long."""
        if any(
            not one.leaving and now - one.heard > self.limit for one in self.neighbours.values()
        ):
            for other in self._silent(now):
                self._report_missing(other, self._silence(other, now), now)

    def _silent(self, now: float) -> list[int]:
        """Return the neighbours that seem to have been missing for a while."""
        return [
            other
            for other, one in self.neighbours.items()
            if not one.leaving and now - one.heard > self.limit / 2
        ]

    def _silence(self, other: int, now: float) -> str:
        one = self.neighbours[other]
        never = (
            ""
            if one.connected
            else ", and no connection: does a firewall close the ports between the hosts?"
        )
        return f"no response for {now - one.heard:.0f} s{never}"

    def _report_missing(self, other: int, what: str, now: float) -> None:
        self._learn_missing({other: (self.neighbours[other].host, what, self.rank)}, None, now)

    def _learn_missing(self, found: dict[int, Missing], source: int | None, now: float) -> None:
        """Take note of missing ranks, and pass on what is new."""
        first = not self.alarm.lost
        if new := self.alarm.add(self._set_departed_aside(found, source), now):
            self._pass_on(f"lost {json.dumps(new)}", source)
            # What died together with the first is named with it
            for other in self._silent(now) if first else ():
                self._report_missing(other, self._silence(other, now), now)

    def _set_departed_aside(
        self, found: dict[int, Missing], source: int | None
    ) -> dict[int, Missing]:
        """Take note of missing ranks that may leave; return the others."""
        known = {rank: row for rank, row in found.items() if rank not in self.left}
        if self.needed is None:
            return known
        # A rank that the others have given up must not come back
        kept = self.needed | {self.rank}
        for rank in known.keys() - kept:
            host, what, _ = known[rank]
            self.left[rank] = False
            self.to_rank.append(f"gone {json.dumps([rank, f'on {host}: {what}', False])}")
            self._pass_on(f"lost {json.dumps({rank: known[rank]})}", source)
            self._see_whether_all_ended()
        return {rank: row for rank, row in known.items() if rank in kept}

    def _leave(self, rank: int, what: str, source: int | None) -> None:
        """Take note of a rank that has ended in order before the others, and pass it on."""
        if rank not in self.left:
            self.left[rank] = True
            self.to_rank.append(f"gone {json.dumps([rank, what, True])}")
            self._pass_on(f"left {rank}", source)

    def _tell_rank(self, line: str, now: float) -> None:
        self.to_rank.append(line)
        self.alarm.set_told(now, self.stopped)

    # --- the end ------------------------------------------------------------------------

    def _see_whether_all_ended(self) -> None:
        """Tell the parent, once, that all ranks from here down have ended."""
        if not self.leaving or not all(
            self.neighbours[child].ended or self._is_gone(child) for child in self.children
        ):
            return
        if self.parent is None or self._is_gone(self.parent):
            self._pass_over()
        elif not self.said_ended:
            self.said_ended = True
            self.outbox.append((self.parent, "ended"))

    def _is_gone(self, other: int) -> bool:
        return self.neighbours[other].gone or self.left.get(other) is False

    def _pass_over(self) -> None:
        self.over = True
        for child in self.children:
            self.outbox.append((child, "over"))

    # --- stalls -------------------------------------------------------------------------

    def _tell_what_ranks_do(self, now: float) -> None:
        """Send up what the ranks from here down do; rank 0 sees whether some wait for others."""
        groups = later([self.group], now - self.group_since)
        for child in self.children:
            one = self.neighbours[child]
            if self.left.get(child) is False:
                continue
            groups += later(one.groups, now - one.groups_at)
        groups = merge(groups)
        if self.parent is not None:
            self.outbox.append((self.parent, f"at {json.dumps(groups)}"))
            return
        kind, text = self.stalls.look(groups)
        if kind == "stall":
            self._pass_down(f"stall {json.dumps(text)}")
        elif kind == "end":
            self._end(f"end {json.dumps(text)}", None, now)

    def _pass_down(self, line: str) -> None:
        self.to_rank.append(f"stall {json.loads(line.partition(' ')[2])}")
        for child in self.children:
            self.outbox.append((child, line))

    def _end(self, line: str, source: int | None, now: float) -> None:
        if self.alarm.told:
            return
        self._pass_on(line, source)
        self._tell_rank(f"end {json.loads(line.partition(' ')[2])}", now)

    def _pass_on(self, line: str, source: int | None) -> None:
        """Say to all neighbours what one of them, or none, has said."""
        self.outbox += [(other, line) for other in self.neighbours if other != source]

    def _say_to_all(self, line: str) -> None:
        self.outbox += [(other, line) for other, one in self.neighbours.items() if one.connected]
