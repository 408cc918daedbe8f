"""What the supervisor knows of one generation: a start of the ranks, up to their end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfcommx.comm.allocation import Host
from tfcommx.elastic.placement import slots_of


class Resumed(NamedTuple):
    """From where a generation goes on, as rank 0 says it."""

    # "memory", "file" or "start"
    source: str
    # Steps since the beginning of the whole run
    total: int
    # For restoring
    seconds: float


@dataclass
class Generation:
    """One start of the ranks.

    Times are seconds of one clock. Without a link to rank 0 nothing is known of the steps.
    """

    number: int
    hosts: tuple[Host, ...]
    began: float
    linked: bool = False
    resumed: Resumed | None = None
    # The first and the last number of steps that rank 0 has said, and when it said them
    first_steps: int = 0
    steps: int | None = None
    first_step_at: float = 0.0
    last_step_at: float = 0.0
    # Snapshots in memory: seconds and bytes of each
    snapshots: list[tuple[float, int]] = field(default_factory=list)
    # Hosts, a rank of which has got SIGTERM
    leaving: list[str] = field(default_factory=list)
    # Whether the supervisor has asked for its end
    asked_to_pause: bool = False
    ended: float = 0.0
    # How it ended, in words
    how: str = ""

    @property
    def ranks(self) -> int:
        """Return how many there are."""
        return slots_of(self.hosts)

    def hear(self, message: dict[str, Any], now: float) -> str:
        """Take note of a message of rank 0.

        Returns:
            "first step" if it tells of the first one, "epoch" if an epoch has ended, else nothing.

        **Raises:** KeyError, TypeError or ValueError for what rank 0 does not say.
        """
        if "connected" in message:
            self.linked = True
        elif "resumed" in message:
            said = message["resumed"]
            self.resumed = Resumed(str(said["from"]), int(said["total"]), float(said["seconds"]))
        elif "steps" in message:
            return self._count(int(message["steps"]), now)
        elif "snapshot" in message:
            said = message["snapshot"]
            self.snapshots.append((float(said["seconds"]), int(said["bytes"])))
            return self._count(int(said["total"]), now)
        elif "leaving" in message:
            self.leaving.append(str(message["leaving"]))
        elif "epoch_ended" in message:
            return "epoch"
        return ""

    def _count(self, total: int, now: float) -> str:
        if total <= self.began_at_step:
            return ""
        first = self.steps is None
        if first:
            self.first_steps, self.first_step_at = total, now
        self.steps, self.last_step_at = max(total, self.steps or 0), now
        return "first step" if first else ""

    @property
    def began_at_step(self) -> int:
        """Return the steps that were behind it when it began."""
        return self.resumed.total if self.resumed else 0

    @property
    def steps_taken(self) -> int:
        """Return the steps that it has taken, as far as rank 0 has said."""
        return 0 if self.steps is None else self.steps - self.began_at_step

    @property
    def training_seconds(self) -> float:
        """Return the seconds between its first and its last known step."""
        return self.last_step_at - self.first_step_at

    @property
    def steps_per_second(self) -> float | None:
        """Return its rate; None before it is known."""
        if self.steps is None or self.steps == self.first_steps:
            return None
        return (self.steps - self.first_steps) / max(self.training_seconds, 1e-3)
