"""Summarise the activity of all ranks on the way to rank 0's watcher, and describe waits.

    rank 5: waits in bucket 2 at step 118 --+
    rank 6: waits in bucket 2 at step 118 --+-- 2 ranks wait in bucket 2 at step 118, 40 s
    rank 1: has left `fit`, after step 117 -+-- 1 rank has left `fit`, after step 117

For any number of ranks, a summary has at most GROUPS groups, with EXAMPLES ranks each. Imports only
the standard library.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

GROUPS = 8
EXAMPLES = 3
# Activities of a rank
WAITS, COMPUTES, PYTHON, LEFT, ENDED, SERVES, UNKNOWN, OTHERS = DOINGS = (
    *("waits", "computes", "python", "left", "ended", "serves", "unknown", "others"),
)
CAUSES = (
    "Usual causes: ranks take unequal numbers of steps (give equally many batches to all, or "
    "`.repeat()` and `steps_per_epoch`); EarlyStopping by each rank's own metric (put "
    "cx.callbacks.AverageMetrics() before it, or cx.callbacks.AgreeOnStop() after it); "
    "TerminateOnNaN without cx.callbacks.AgreeOnStop() after it; a gradient that is None, or a "
    "layer that is frozen, on some ranks only (give zeros); a part of the script that only some "
    "ranks run."
)
# Waits that are reported, after which ranks count as waiting for each other: until then the first
# rank to leave a long broadcast may only have begun the next step before the last one has its bytes
CERTAIN_WAITS = 5
# Beginning of the description of a collective that Python calls, outside of a step's exchange
COLLECTIVE = "a collective"
SLOW = "All are there: the network or the collective itself is slow, or does not work."


class Group(NamedTuple):
    """Ranks with the same activity."""

    # Number of exchanges that they have begun
    step: int
    # WAITS, COMPUTES, ...
    doing: str
    # The collective that they wait in; otherwise the source line of the first example
    what: str
    size: int
    # The lowest of the ranks, at most EXAMPLES
    ranks: Sequence[int]
    # Longest duration of the activity among the ranks
    seconds: float


def group_of(rank: int, step: int, doing: str, details: str) -> Group:
    return Group(step, doing, details, 1, [rank], 0.0)


def later(groups: Sequence[Group], seconds: float) -> list[Group]:
    """Return the groups after `seconds` without a change."""
    return [group._replace(seconds=round(group.seconds + seconds, 1)) for group in groups]


def merge(groups: Sequence[Group]) -> list[Group]:
    """Merge groups with the same activity; keep at most GROUPS.

    >>> ones = [group_of(rank, 118, WAITS, "bucket 2") for rank in range(100)]
    >>> for group in merge([*ones, group_of(100, 117, LEFT, "train.py:31")]):
    ...     print(group.step, group.doing, group.size, group.ranks)
    117 left 1 [100]
    118 waits 100 [0, 1, 2]

    The longest waits and the groups that do not wait are kept; the others become one group OTHERS.
    """
    merged: dict[tuple[int, str, str], Group] = {}
    for group in groups:
        # The source lines of ranks that do not wait differ, and one example is enough
        key = (group.step, group.doing, group.what if group.doing == WAITS else "")
        merged[key] = _both(merged[key], group) if key in merged else group
    waiting = sorted(
        (entry for entry in merged.values() if entry.doing == WAITS), key=attrgetter("seconds")
    )
    waiting.reverse()  # The longest first
    not_waiting = sorted(entry for entry in merged.values() if entry.doing not in (WAITS, OTHERS))
    overflow = [entry for entry in merged.values() if entry.doing == OTHERS]
    places = GROUPS - 1
    # Each kind has half of the places, and those that the other kind leaves free, because a report
    # needs both the waiting ranks and their cause
    kept_waiting = waiting[: max(places // 2, places - len(not_waiting))]
    kept_not_waiting = not_waiting[: places - len(kept_waiting)]
    for group in waiting[len(kept_waiting) :] + not_waiting[len(kept_not_waiting) :]:
        overflow = [_both(overflow[0], group)] if overflow else [group]
    overflow = [entry._replace(step=0, doing=OTHERS, what="", seconds=0.0) for entry in overflow]
    return [*kept_not_waiting, *kept_waiting, *overflow]


def _both(first: Group, second: Group) -> Group:
    lowest = min(first, second, key=lambda group: group.ranks[0])
    return lowest._replace(
        size=first.size + second.size,
        ranks=sorted({*first.ranks, *second.ranks})[:EXAMPLES],
        seconds=max(first.seconds, second.seconds),
    )


def describe(groups: Sequence[Group]) -> str:
    """Return a report of the longest wait, the other ranks' activities, and the usual causes.

    >>> print(describe([group_of(1, 117, LEFT, "train.py:31 in <module>"),
    ...                 Group(118, WAITS, "the exchange of bucket 2", 3, [0, 2, 3], 62.0)]))
    Ranks 0, 2, 3 have waited 62 s in the exchange of bucket 2 at step 118, and all ranks are \
alive. Rank 1 has left `fit`, after step 117: train.py:31 in <module>. Usual causes: ranks take \
unequal numbers of steps (give equally many batches to all, or `.repeat()` and `steps_per_epoch`); \
EarlyStopping by each rank's own metric (put cx.callbacks.AverageMetrics() before it, or \
cx.callbacks.AgreeOnStop() after it); TerminateOnNaN without cx.callbacks.AgreeOnStop() after it; \
a gradient that is None, or a layer that is frozen, on some ranks only (give zeros); a part of the \
script that only some ranks run.
    """
    waiting = [group for group in groups if group.doing == WAITS]
    longest = max(waiting, key=attrgetter("seconds"))
    # No rank waits in a collective for a process that serves the others
    remaining = [group for group in groups if group is not longest and group.doing != SERVES]
    waits = f"{longest.seconds:.0f} s in {longest.what} at step {longest.step}"
    sentences = [
        f"{_ranks(longest)} waited {waits}, and all ranks are alive.",
        *map(_clause, remaining),
    ]
    return " ".join([*sentences, CAUSES if remaining else SLOW])


def _clause(group: Group) -> str:
    which, after, where = _ranks(group), f"after step {group.step}", f": {group.what}"
    return {
        WAITS: f"{which} waited {group.seconds:.0f} s in {group.what} at step {group.step}.",
        COMPUTES: f"{which} begun a training step {after}, and computes or waits for its data.",
        PYTHON: f"{which} been in Python for {group.seconds:.0f} s {after}{where}.",
        LEFT: f"{which} left `fit`, {after}{where}.",
        ENDED: f"{which} ended the script.",
        UNKNOWN: f"{which} told nothing yet.",
        OTHERS: f"{which} done something else.",
    }[group.doing]


def _ranks(group: Group) -> str:
    if group.size == 1:
        return f"Rank {group.ranks[0]} has"
    more = group.size - len(group.ranks)
    names = ", ".join(map(str, group.ranks))
    return f"Ranks {names}{f' and {more} more' if more else ''} have"


def can_end(groups: Sequence[Group]) -> bool:
    """Return False if every rank waits for another that will not begin the same collective.

    Some wait in the exchange of a step. The others have taken fewer steps and wait in a collective
    that Python calls, such as that of an epoch's end: they begin no step before it ends, and it
    does not end before all ranks have taken part.

    >>> step, end = "the exchange of 'net/bias'", "a collective of BroadcastState.on_epoch_end"
    >>> can_end([group_of(0, 5, WAITS, step), group_of(1, 4, WAITS, end)])
    False
    >>> can_end([group_of(0, 5, WAITS, step), group_of(1, 4, LEFT, "train.py:31 in <module>")])
    True
    """
    active = [group for group in groups if group.doing != SERVES]
    first = min((group.step for group in active), default=0)
    behind = [group for group in active if group.step == first]
    ahead = [group for group in active if group.step > first]
    return not (
        all(group.doing == WAITS for group in active)
        and all(group.what.startswith(COLLECTIVE) for group in behind)
        and any(not group.what.startswith(COLLECTIVE) for group in ahead)
    )


class StallWatch:
    """Detects, at rank 0's watcher, ranks that wait for others.

    Args:
        seconds: shortest wait that is reported, > 0; ranks that wait CERTAIN_WAITS times as long
            for each other end. None: neither.
        limit: shortest wait that ends the job, > 0; None: no limit.
    """

    def __init__(self, seconds: float | None, limit: float | None) -> None:
        self.seconds, self.limit = seconds, limit
        self.on = seconds is not None or limit is not None
        # Seconds of the next wait that is reported; True during a wait that was reported
        self._report_at, self._reported = seconds, False

    def look(self, groups: Sequence[Group]) -> tuple[str, str]:
        """Return ("stall", a report), ("end", the reason), or ("", "")."""
        longest = max((group.seconds for group in groups if group.doing == WAITS), default=0.0)
        if self.limit is not None and longest >= self.limit:
            return "end", f"{describe(groups)} The limit of {self.limit:g} s has been reached."
        shortest = min((group.seconds for group in groups if group.doing == WAITS), default=0.0)
        certain = self.seconds is not None and shortest >= CERTAIN_WAITS * self.seconds
        if certain and not can_end(groups):
            return "end", f"{describe(groups)} None can continue, because each waits for the other."
        if self._report_at is None or self.seconds is None:
            return "", ""
        if longest < self.seconds:
            self._reported = False
        elif longest >= self._report_at and not self._reported:
            self._reported = True
            # A later wait is reported only if it is twice as long
            self._report_at = 2 * self._report_at
            return "stall", describe(groups)
        return "", ""
