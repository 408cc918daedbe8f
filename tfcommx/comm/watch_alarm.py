"""An alarm at one watcher: which ranks are missing, and from the first sign to the rank's end.

    first sign -- GATHER_SECONDS --> the rank is told -- LAST_WORDS_SECONDS --> it is killed

A rank that Gloo has aborted is no cause: CAUSE_SECONDS are left for a watcher to name one.

What ranks of a node that die together have in common is named together; what ends after the rank
was told ends because of the alarm.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

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
        self.lost: dict[int, list[Any]] = {}
        # Whether the rank was told; when it is killed
        self.told = False
        self.kill_at: float | None = None
        # When the first missing rank was known, and the first that was not aborted
        self._first_at = self._cause_at = math.inf

    def add(self, found: dict[int, list[Any]], now: float) -> dict[int, list[Any]]:
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
