"""How a supervised run is started again; the command line's options by another name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tfcommx.terms import PlanError

# Of --blacklist-cooldown-range and --elastic-timeout
COOLDOWN_SECONDS = (60.0, 3600.0)
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class ElasticOptions:
    """Limits of a supervised run.

    **Raises:** PlanError for values out of their ranges.
    """

    # Ranks of a generation, >= 1
    fewest: int = 1
    # At most; None: as many as the hosts have slots
    most: int | None = None
    # For the first generation, >= fewest
    first: int = 1
    # Generations after the first one, >= 0; None: any number
    reset_limit: int | None = None
    # Seconds that a lost host is left out: the first time, and at most
    cooldown: tuple[float, float] = COOLDOWN_SECONDS
    # Seconds to wait for enough hosts, >= 0
    timeout: float = TIMEOUT_SECONDS
    # Minutes after which a generation may be ended to grow, > 0; None: at the end of an epoch only
    grow_every: float | None = None
    # Where the table of generations is written as JSON
    file: Path | None = None
    # Network interfaces of the ranks; empty: any
    interfaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check them."""
        if self.most is not None and self.most < self.fewest:
            raise PlanError(
                "--max-np must be at least --min-np. Received "
                f"--max-np {self.most} and --min-np {self.fewest}."
            )
        shortest, longest = self.cooldown
        if not 0 < shortest <= longest < math.inf:
            raise PlanError(
                "--blacklist-cooldown-range must be two numbers of seconds, 0 < shortest <= "
                f"longest. Received {shortest:g} and {longest:g}."
            )
