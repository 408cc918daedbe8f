"""Why a generation has ended, and whether the run goes on."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tfcommx.comm.horovodrun import Launch
from tfcommx.comm.rank_lines import Failure, RankLines
from tfcommx.comm.supervision import PAUSED
from tfcommx.elastic.generation import Generation

# Generations in a row that may die at the same step
DEATHS = 3
# Without a link: a generation that ends earlier has got no further than its start
START_SECONDS = 60.0
# So far behind its steps rank 0 may have said the last number
REPORT_SECONDS = 1.0
# Exit status of ssh when the connection is lost
SSH_LOST = 255
# What a rank's watcher says of others
SILENT = re.compile(r"rank (\d+) on \S+ \(no response")
CUT_OFF = "it may have been cut off"

# Gloo aborts the ranks that notice that one has ended
ABORTED = 128 + signal.SIGABRT
# So long after the first one a rank that failed by itself may be seen to end, over ssh; those that
# horovodrun ends get SIGKILL later
SEEN_SECONDS = 3.0


def first_failure(lines: RankLines) -> Failure | None:
    """Return the rank that failed first; not one that was aborted because of it, if that is known.

    Args:
        lines: what the launcher has said.
    """
    first = lines.failure()
    if first is None or first.status != ABORTED:
        return first
    soon = [
        failure
        for when, failure in lines.endings
        if when - lines.endings[0][0] < SEEN_SECONDS
        and failure.status not in (ABORTED, 128 + signal.SIGTERM)
    ]
    return soon[0] if soon else first


class Ending(NamedTuple):
    """How a generation ended."""

    # The rank that ended first; None if the launcher does not say so
    first: Failure | None
    # Whether the ranks were asked to pause, or a host leaves
    asked: bool = False
    # What ranks have said of others that they missed
    reports: Sequence[str] = ()
    # Hosts that do not answer, and those that have said that they leave
    dead: Collection[str] = ()
    leaving: Collection[str] = ()

    @property
    def paused(self) -> bool:
        """Return whether the ranks have saved, and want to be started again."""
        return self.asked and self.first is not None and self.first.status == PAUSED

    def silent(self, launch: Launch) -> dict[int, str]:
        """Return the ranks that did not respond, with their hosts, if those answer."""
        said = [text for text in self.reports if CUT_OFF not in text] or self.reports
        ranks = sorted({int(rank) for text in said for rank in SILENT.findall(text)})
        known = {rank: launch.host_of(rank) for rank in ranks if rank < launch.size}
        return {} if self.dead or self.paused else known

    def what_was_lost(self, launch: Launch) -> str:
        """Say it, as the beginning of a sentence."""
        if self.paused:
            if self.leaving:
                return f"{', '.join(sorted(self.leaving))} leaves (SIGTERM)"
            return "All ranks have saved and paused"
        if self.dead:
            return "; ".join(_host_with_ranks(host, launch) for host in self.dead)
        if silent := self.silent(launch):
            names = ", ".join(f"rank {rank} on {host}" for rank, host in silent.items())
            return f"No response from {names}: stopped, or cut off"
        if self.first is None:
            return "The launcher ended, and does not say which rank was the first"
        where = f"rank {self.first.rank} on {launch.host_of(self.first.rank)}"
        if self.first.status == SSH_LOST:
            return f"The connection to {where} was lost"
        return f"R{where[1:]} {self.first.how()}"


def _host_with_ranks(host: str, launch: Launch) -> str:
    ranks = [rank for rank in range(launch.size) if launch.host_of(rank) == host]
    shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{host} with {shown} does not answer"


class Deaths:
    """Counts generations that died without getting further: the program fails by itself."""

    def __init__(self) -> None:
        self.count = 0
        self._furthest, self._unsaid = -1, 0.0

    def add(self, generation: Generation) -> bool:
        """Count one in which no host was lost; return whether there have been too many."""
        self.count = 1 if self._got_further(generation) else self.count + 1
        return self.count >= DEATHS

    def _got_further(self, generation: Generation) -> bool:
        if not generation.linked:
            return generation.ended - generation.began >= START_SECONDS
        if generation.steps is None:
            return False
        unsaid = (generation.steps_per_second or 0.0) * REPORT_SECONDS
        self._unsaid = max(self._unsaid, unsaid)
        before, self._furthest = self._furthest, max(self._furthest, generation.steps)
        return before < 0 or generation.steps > before + self._unsaid

    def in_words(self, generation: Generation) -> str:
        """Say how often, and where."""
        if not generation.linked:
            where = f"within {START_SECONDS:g} s of their start"
        elif self._furthest < 0:
            where = "before their first step"
        else:
            where = f"at step {self._furthest}"
        return f"{self.count} generations have ended {where}: the program fails by itself."
