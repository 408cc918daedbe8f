"""Record the ranks that have left while the others continue, if no rank waits for another.

Usually a rank that dies makes all others end (liveness.py). After `allow_leaving` only the death of
a needed rank does; this rank is informed of the other deaths, and continues. Collectives are
impossible after the first death, because the dead rank would be missing in each.

`find_dead` asks every rank's watcher directly, because watchers end with their ranks, and after a
few deaths no neighbour may be left to report another.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Collection

from tfcommx.core import RankLostError

# Period of probing for ranks whose end no watcher would report
FIND_SECONDS = 5.0


class Membership:
    """The ranks that have left, as far as this rank knows."""

    def __init__(self) -> None:
        # Rank -> description; ranks that ended in order are not in `_died`
        self._ended: dict[int, str] = {}
        self._died: dict[int, str] = {}
        # Neighbours that have ended in order while all were needed. For messages only: they are not
        # `gone`, because a process that holds the centre still awaits their last messages
        self.early: set[int] = set()
        # The ranks without which no other continues, while others may leave
        self.needed: Collection[int] = ()
        self._send: Callable[[bytes], object] | None = None
        # For `find_dead`: the probe, its ranks, and the seconds of silence after which one is dead
        self._responds: Callable[[int], bool] | None = None
        self._others: Collection[int] = ()
        self._limit = math.inf
        # Rank -> time of its first missing response
        self._silent: dict[int, float] = {}
        # Time of the next probe; infinite during one
        self._look_at = 0.0

    def report_to(self, send: Callable[[bytes], object]) -> None:
        """Set the function that sends lines to the watcher."""
        self._send = send

    def probe_with(
        self, responds: Callable[[int], bool], other_ranks: Collection[int], limit: float
    ) -> None:
        """Set the probe of `find_dead`; a rank silent for `limit` seconds is dead."""
        self._responds, self._others, self._limit = responds, other_ranks, limit

    def find_dead(self) -> None:
        """Probe for unreported dead ranks, in a thread, once a rank has left.

        **Cost:** one connection for each rank every FIND_SECONDS; none before the first departure.
        """
        responds = self._responds
        if responds is None or not self.gone() or time.monotonic() < self._look_at:
            return
        self._look_at = math.inf
        # A thread, because the caller waits for a rank, and a dead host takes seconds to refuse
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
                # Not at once, because a link may be down for a while
                if silent >= self._limit:
                    self.mark_gone(rank, f"its watcher has not responded for {silent:.0f} s", False)
        finally:  # A failed probe is repeated
            self._look_at = time.monotonic() + FIND_SECONDS

    def allow_leaving(self, needed: Collection[int]) -> None:
        """Permit the ranks that are not needed to leave. **Ranks:** all, with equal arguments."""
        self.needed = needed
        if self._send is not None:
            self._send(f"needs {json.dumps(sorted(needed))}\n".encode())

    def forbid_leaving(self) -> None:
        self.needed = ()
        if self._send is not None:
            self._send(b"needs all\n")

    def mark_gone(self, rank: int, event: str, in_order: bool) -> None:
        """Record that a rank has left; `event` describes how, for messages."""
        (self._ended if in_order else self._died)[rank] = event

    def gone(self) -> set[int]:
        """Return the ranks that have left, in order or dead."""
        return {*self._ended, *self._died}

    def any_died(self) -> bool:
        return bool(self._died)

    def require_all(self) -> None:
        """Refuse a collective that would wait forever for a rank that has died.

        **Raises:** RankLostError that names it.
        """
        # A copy, because another thread may record an end meanwhile
        for rank, event in list(self._died.items()):
            raise RankLostError(
                "A collective needs all ranks. Received a call of one after rank "
                f"{rank} has left ({event}); the training alone continues without it. Let one rank "
                "save the model, and start again."
            )
