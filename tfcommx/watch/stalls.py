"""Who waits for whom: what the ranks do, in few words, added up on the way to rank 0's watcher.

    rank 5: waits in bucket 2 at step 118 --+
    rank 6: waits in bucket 2 at step 118 --+-- 2 ranks wait in bucket 2 at step 118, 40 s
    rank 1: has left `fit`, after step 117 -+-- 1 rank has left `fit`, after step 117

However many ranks there are, a summary has at most GROUPS groups, with EXAMPLES ranks each. Knows
only the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GROUPS = 8
EXAMPLES = 3
# What a rank does
WAITS, COMPUTES, PYTHON, LEFT, ENDED, SERVES, UNKNOWN, OTHERS = DOINGS = (
    "waits",
    "computes",
    "python",
    "left",
    "ended",
    "serves",
    "unknown",
    "others",
)
CAUSES = (
    "Usual causes: ranks take unequal numbers of steps (give `steps_per_epoch`, or equally many "
    "batches to all); EarlyStopping by each rank's own metric (put cx.callbacks.AverageMetrics() "
    "before it, or cx.callbacks.AgreeOnStop() after it); a part of the script that only some ranks "
    "run."
)
SLOW = "All are there: the network or the collective itself is slow, or does not work."


class Group(NamedTuple):
    """Ranks that do the same."""

    # Exchanges that they have begun
    step: int
    # WAITS, COMPUTES, ...
    doing: str
    # The collective that they wait in; else where the first example is
    what: str
    size: int
    # The lowest of them, at most EXAMPLES
    ranks: Sequence[int]
    # For how long, at least one of them
    seconds: float


def group_of(rank: int, step: int, doing: str, what: str) -> Group:
    """Return a group of this rank alone, which begins now."""
    return Group(step, doing, what, 1, [rank], 0.0)


def later(groups: Sequence[Group], seconds: float) -> list[Group]:
    """Return the groups as they are if nothing has changed in the meantime."""
    return [group._replace(seconds=round(group.seconds + seconds, 1)) for group in groups]


def merge(groups: Sequence[Group]) -> list[Group]:
    """Add groups up that do the same; keep at most GROUPS.

    >>> ones = [group_of(rank, 118, WAITS, "bucket 2") for rank in range(100)]
    >>> for group in merge([*ones, group_of(100, 117, LEFT, "train.py:31")]):
    ...     print(group.step, group.doing, group.size, group.ranks)
    117 left 1 [100]
    118 waits 100 [0, 1, 2]

    The longest waits are kept, and those who do not wait; what is beyond becomes one group OTHERS.
    """
    found: dict[tuple[int, str, str], Group] = {}
    for group in groups:
        key = (group.step, group.doing, group.what if group.doing == WAITS else "")
        found[key] = _both(found[key], group) if key in found else group
    waiting = sorted((one for one in found.values() if one.doing == WAITS), key=_seconds)[::-1]
    rest = sorted(one for one in found.values() if one.doing not in (WAITS, OTHERS))
    others = [one for one in found.values() if one.doing == OTHERS]
    places = GROUPS - 1
    kept_waiting = waiting[: max(places // 2, places - len(rest))]
    kept_rest = rest[: places - len(kept_waiting)]
    for group in waiting[len(kept_waiting) :] + rest[len(kept_rest) :]:
        others = [_both(others[0], group)] if others else [group]
    others = [one._replace(step=0, doing=OTHERS, what="", seconds=0.0) for one in others]
    return [*kept_rest, *kept_waiting, *others]


def _seconds(group: Group) -> float:
    return group.seconds


def _both(one: Group, other: Group) -> Group:
    first = min(one, other, key=lambda group: group.ranks[0])
    return first._replace(
        size=one.size + other.size,
        ranks=sorted({*one.ranks, *other.ranks})[:EXAMPLES],
        seconds=max(one.seconds, other.seconds),
    )


def describe(groups: Sequence[Group]) -> str:
    """Say who waits for whom, where the others are, and what the usual causes are.

    A process that serves the others takes no steps: no rank waits for it in a collective.

    >>> print(describe([group_of(1, 117, LEFT, "train.py:31 in <module>"),
    ...                 Group(118, WAITS, "the exchange of bucket 2", 3, [0, 2, 3], 62.0)]))
    Ranks 0, 2, 3 have waited 62 s in the exchange of bucket 2 at step 118, and all ranks are \
alive. Rank 1 has left `fit`, after step 117: train.py:31 in <module>. Usual causes: ranks take \
unequal numbers of steps (give `steps_per_epoch`, or equally many batches to all); EarlyStopping \
by each rank's own metric (put cx.callbacks.AverageMetrics() before it, or \
cx.callbacks.AgreeOnStop() after it); a part of the script that only some ranks run.
    """
    waiting = [group for group in groups if group.doing == WAITS]
    longest = max(waiting, key=_seconds)
    rest = [group for group in groups if group is not longest and group.doing != SERVES]
    waits = f"{longest.seconds:.0f} s in {longest.what} at step {longest.step}"
    said = [f"{_ranks(longest)} waited {waits}, and all ranks are alive.", *map(_clause, rest)]
    return " ".join([*said, CAUSES if rest else SLOW])


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


class StallWatch:
    """Decides, at rank 0's watcher, whether ranks wait for others.

    Args:
        seconds: a wait that is reported, > 0; None: none is.
        limit: a wait that ends the job, > 0; None: none does.
    """

    def __init__(self, seconds: float | None, limit: float | None) -> None:
        self.seconds, self.limit = seconds, limit
        self.on = seconds is not None or limit is not None
        # The next wait that is reported; whether one is under way that was
        self._report_at, self._reported = seconds, False

    def look(self, groups: Sequence[Group]) -> tuple[str, str]:
        """Return ("stall", a report), ("end", why the job ends), or ("", "").

        A wait is reported once, a later one if it is twice as long.
        """
        longest = max((group.seconds for group in groups if group.doing == WAITS), default=0.0)
        if self.limit is not None and longest >= self.limit:
            return "end", f"{describe(groups)} The limit of {self.limit:g} s has been reached."
        if self._report_at is None or self.seconds is None:
            return "", ""
        if longest < self.seconds:
            self._reported = False
        elif longest >= self._report_at and not self._reported:
            self._reported = True
            self._report_at = 2 * self._report_at
            return "stall", describe(groups)
        return "", ""
