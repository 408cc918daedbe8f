"""Which ranks have left while the others go on: for trainings in which no rank waits for another.

Usually a rank that dies makes all others end (liveness.py). While `allow` holds, only the ranks
that are needed do; of the others this one is told, and goes on. A process that has died without a
word is missing in every collective from then on, so that none can be done any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from tfcommx.terms import PlanError


class Departures:
    """What this rank knows of ranks that have left."""

    def __init__(self) -> None:
        # Rank -> what happened, in words; those that ended in order are not among the dead
        self._ended: dict[int, str] = {}
        self._died: dict[int, str] = {}
        self._send: Callable[[bytes], object] | None = None

    def watch(self, send: Callable[[bytes], object]) -> None:
        """Tell the watcher, from now on, through `send`, who may leave."""
        self._send = send

    def allow(self, needed: Collection[int]) -> None:
        """Let ranks leave that are not needed. **Ranks:** all, with equal arguments."""
        if self._send is not None:
            self._send(f"needs {json.dumps(sorted(needed))}\n".encode())

    def forbid(self) -> None:
        """Need all ranks again."""
        if self._send is not None:
            self._send(b"needs all\n")

    def add(self, rank: int, what: str, in_order: bool) -> None:
        """Take note that a rank has left; `what` says how, for people."""
        (self._ended if in_order else self._died)[rank] = what

    def ranks(self) -> set[int]:
        """Return the ranks that have left, in whichever way."""
        return {*self._ended, *self._died}

    def died(self) -> bool:
        """Tell whether a rank has left without a word."""
        return bool(self._died)

    def require_all(self) -> None:
        """Refuse a collective that would wait forever for a rank that has died.

        **Raises:** PlanError that names it.
        """
        for rank, what in list(self._died.items()):
            raise PlanError(
                "A collective needs all ranks. Received a call of one after rank "
                f"{rank} has left ({what}); the training alone goes on without it. Let rank 0 "
                "save the model, and start again."
            )
