"""Which ranks have left while the others go on: for trainings in which no rank waits for another.

Usually a rank that dies makes all others end (liveness.py). After `allow_leaving` only the death of
a needed rank does; of the other ranks this one is told, and goes on. Collectives are impossible
from the first death on, because the dead rank would be missing in each.

Watchers end with their ranks and pass nothing on. After a few deaths nobody may be left who would
tell of one more: `find_dead` asks every rank's watcher itself.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection

from tfcommx.core import RankLostError

# Between two looks for ranks whose end nobody would tell
FIND_SECONDS = 5.0


class Membership:
    """What this rank knows of ranks that have left."""

    def __init__(self) -> None:
        # Rank -> what happened, in words; those that ended in order are not among the dead
        self._ended: dict[int, str] = {}
        self._died: dict[int, str] = {}
        self._send: Callable[[bytes], object] | None = None
        # What `find_dead` asks, whom, and after how many seconds without an answer a rank is gone
        self._responds: Callable[[int], bool] | None = None
        self._others: Collection[int] = ()
        self._limit = math.inf
        # Rank -> since when it does not respond
        self._silent: dict[int, float] = {}
        # Time of the next look; infinite while one is under way
        self._look_at = 0.0

    def report_to(self, send: Callable[[bytes], object]) -> None:
        """Tell the watcher, from now on, through `send`, who may leave."""
        self._send = send

    def probe_with(
        self, responds: Callable[[int], bool], others: Collection[int], limit: float
    ) -> None:
        """Let `find_dead` ask watchers through `responds`; silent for `limit` seconds: dead."""
        self._responds, self._others, self._limit = responds, others, limit

    def find_dead(self) -> None:
        """Look for ranks that are gone without anybody's telling, in a thread, if one has left.

        For whoever waits for a rank. **Cost:** one connection for each rank every FIND_SECONDS;
        nothing before the first departure, or without a watch.
        """
        responds = self._responds
        if responds is None or not self.gone() or time.monotonic() < self._look_at:
            return
        self._look_at = math.inf
        threading.Thread(
            target=self._look, args=(responds,), name="tfcommx-find", daemon=True
        ).start()

    def _look(self, responds: Callable[[int], bool]) -> None:
        try:
            for rank in sorted(set(self._others) - self.gone()):
                if responds(rank):
                    self._silent.pop(rank, None)
                    continue
                silent = time.monotonic() - self._silent.setdefault(rank, time.monotonic())
                # A link may be down for a while, as the watch has it
                if silent >= self._limit:
                    self.mark_gone(rank, f"its watcher has not responded for {silent:.0f} s", False)
        finally:  # A look that has failed is not the last
            self._look_at = time.monotonic() + FIND_SECONDS

    def allow_leaving(self, needed: Collection[int]) -> None:
        """Let ranks leave that are not needed. **Ranks:** all, with equal arguments."""
        if self._send is not None:
            self._send(f"needs {json.dumps(sorted(needed))}\n".encode())

    def forbid_leaving(self) -> None:
        """Need all ranks again."""
        if self._send is not None:
            self._send(b"needs all\n")

    def mark_gone(self, rank: int, what: str, in_order: bool) -> None:
        """Take note that a rank has left; `what` says how, for people."""
        (self._ended if in_order else self._died)[rank] = what

    def gone(self) -> set[int]:
        """Return the ranks that have left, in whichever way."""
        return {*self._ended, *self._died}

    def any_died(self) -> bool:
        """Tell whether a rank has left without a word."""
        return bool(self._died)

    def require_all(self) -> None:
        """Refuse a collective that would wait forever for a rank that has died.

        **Raises:** RankLostError that names it.
        """
        for rank, what in list(self._died.items()):
            raise RankLostError(
                "A collective needs all ranks. Received a call of one after rank "
                f"{rank} has left ({what}); the training alone goes on without it. Let one rank "
                "save the model, and start again."
            )
