"""What a simulated step assumes besides profile, plan and links; curves of selection times."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from tfcommx.terms import Links, PlanError, Profile, check_name

# Entries of a vector -> seconds of selecting from it.
SelectionTime = Callable[[int], float]


@dataclass(frozen=True)
class Assumptions:
    """What a step is simulated under; the defaults disturb nothing.

    >>> Assumptions(spread=0.1).slowest(1), round(Assumptions(spread=0.1).slowest(16), 3)
    (1.0, 1.177)
    """

    # Seconds of selecting from a vector of so many entries; None: at the link's gamma per byte, as
    # the price of hitopk counts it (equation 8 of CommLib).
    selection: SelectionTime | None = None
    # Where it runs: "compute" delays the backward pass; "beside" it has a stream of its own.
    selection_on: str = "compute"
    # Seconds that the engine needs for each collective besides its price, >= 0: negotiation, cycle.
    # None: as the links say.
    engine_s: float | None = None
    # Can the ports inside and between work on two messages at once? Horovod's engine carries out
    # one collective after the other.
    ports_together: bool = False
    # Of the compute times of the ranks: standard deviation / mean, >= 0. All ranks wait for the
    # slowest one.
    spread: float = 0.0
    # By how much longer a message takes while the backward pass runs: 0.5 is half as long again.
    # None: as the links say.
    contention: float | None = None
    # Does the engine negotiate at once for all that waits, and carry out the allreduces among them
    # as one, as Horovod does? None: as the links say. Its limit of 128 MiB is not counted.
    fuses: bool | None = None
    # Seconds of loading a batch on the cores of the host, >= 0, during the step before.
    loading_s: float = 0.0

    def __post_init__(self) -> None:
        check_name("place of the selection", self.selection_on, ("compute", "beside"))
        for name in ("engine_s", "spread", "contention", "loading_s"):
            value = getattr(self, name)
            if value is None and name in ("engine_s", "contention"):
                continue
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise PlanError(f"`{name}` must be >= 0. Received {name}={value!r}.")

    def on(self, links: Links) -> Assumptions:
        """Return these assumptions, with what the links say where these say nothing.

        >>> from tfcommx.terms import NOMINAL
        >>> Assumptions(contention=0.5).on(NOMINAL._replace(engine_s=1e-3, contention=2.0))
        Assumptions(selection=None, selection_on='compute', engine_s=0.001, ports_together=False,
                   spread=0.0, contention=0.5, fuses=False, loading_s=0.0)
        """
        own = {name: getattr(self, name) for name in ("engine_s", "contention", "fuses")}
        return dataclasses.replace(
            self,
            **{name: getattr(links, name) if one is None else one for name, one in own.items()},
        )

    def slowest(self, ranks: int) -> float:
        """Return the compute time of the slowest of some ranks over the mean.

        It is the expected largest of as many normal numbers, after Blom (1958).
        """
        if self.spread == 0 or ranks == 1:
            return 1.0
        return 1 + self.spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def sorting_time(gamma: float, density: float = 1.0) -> SelectionTime:
    """Return the time of an exact selection: gamma density d log2 d for d entries.

    >>> sorting_time(1e-3, density=0.5)(1024)
    5.12

    Source: Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient
    Sparsification on GPUs" (2020), equation 10. The base of its logarithm is not stated; the
    authors' code has 2, and no density.
    """
    return lambda entries: gamma * density * entries * math.log2(entries) if entries > 1 else 0.0


def interpolated_time(points: Sequence[tuple[int, float]]) -> SelectionTime:
    """Return the curve through measured (entries, seconds).

    It is linear between two points; before the first and after the last one it is proportional.

    >>> curve = interpolated_time([(100, 1.0), (200, 3.0)])
    >>> curve(150), curve(400)
    (2.0, 6.0)

    **Raises:** PlanError without any point.
    """
    known = sorted(dict(points).items())
    if not known or known[0][0] < 1:
        raise PlanError(f"Times of vectors of >= 1 entry are required. Received {list(points)}.")
    sizes = [size for size, _ in known]

    def seconds(entries: int) -> float:
        place = bisect.bisect_left(sizes, entries)
        if place in (0, len(known)):
            size, time = known[min(place, len(known) - 1)]
            return time * entries / size
        (low, low_time), (high, high_time) = known[place - 1], known[place]
        return low_time + (high_time - low_time) * (entries - low) / (high - low)

    return seconds


def measured_time(profile: Profile) -> SelectionTime | None:
    """Return the curve through a profile's selection times; None if it has none."""
    points = [
        (row.size, row.selection_s)
        for row in profile.variables
        if row.selection_s is not None and row.size
    ]
    return interpolated_time(points) if points else None
