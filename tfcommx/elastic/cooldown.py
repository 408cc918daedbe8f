"""Which hosts are left out for a while: those that were lost, or said that they go."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

# A host that says that it goes still answers for a while
LEAVING_SECONDS = 300.0


class Cooldown:
    """Leaves hosts out, for longer each time.

    A host comes back after its time, or as soon as discovery names it again after it did not.

    Args:
        shortest: seconds, the first time, > 0.
        longest: seconds at most; each time doubles the time before.
        clock: returns seconds.
    """

    def __init__(
        self, shortest: float, longest: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._range, self._clock = (shortest, longest), clock
        self._times: dict[str, int] = {}
        self._until: dict[str, float] = {}
        self._unnamed: set[str] = set()

    def leave_out(self, host: str, at_least: float = 0.0) -> float:
        """Leave a host out; return for how many seconds."""
        shortest, longest = self._range
        before = self._times.get(host, 0)
        seconds = max(at_least, min(longest, shortest * 2.0 ** min(before, 30)))
        self._times[host] = before + 1
        self._until[host] = self._clock() + seconds
        return seconds

    def allowed(self, named: Collection[str]) -> set[str]:
        """Return which of the hosts that discovery names now may be used."""
        for host in self._unnamed & set(named):
            self._until.pop(host, None)
        self._unnamed = {host for host in self._until if host not in named}
        return {host for host in named if self._clock() >= self._until.get(host, 0.0)}
