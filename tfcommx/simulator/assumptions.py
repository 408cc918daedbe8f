"""Assumptions of a simulated step besides profile, plan and links.

Selecting from a vector takes a time that is a function of its entries: a formula, or measured. A
node may be slow, and ports may vary: all ranks wait for the slowest.

    port of node 0   |==========|          rates are new in each step: uniform, from (1 - jitter)
    port of node 1   |=======|             of a port's rate to all of it
    port of node 2   |================|    a collective ends when this one has carried its part

A step depends on the slowest port alone, whose rate r has a known distribution. With u uniform,

    P(slowest port >= r) = P(slow_port (1 - jitter u) >= r) P(1 - jitter u >= r)^(m - 1)

so the step at a quantile is simulated at that quantile of r, and no random numbers are drawn. A
port keeps its rate during a step. The plan is made before: it knows nothing of all this. Where an
engine sleeps for a cycle and fuses what waits, a slower port may fuse more, so that a quantile of
the steps is met to within a cycle only.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from tfcommx import engines
from tfcommx.core import Calibration, ConfigurationError, Links, Profile, Topology, check_name

# Entries of a vector -> seconds of selecting from it.
SelectionTime = Callable[[int], float]


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

    **Raises:** ConfigurationError without any point.
    """
    known = sorted(dict(points).items())
    if not known or known[0][0] < 1:
        raise ConfigurationError(
            f"Times of vectors of >= 1 entry are required. Received {list(points)}."
        )
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
    # Whether the ports inside and between carry two messages at once. Horovod's engine carries out
    # one collective after the other.
    ports_together: bool = False
    # Of the compute times of the ranks: standard deviation / mean, >= 0. All ranks wait for the
    # slowest one.
    spread: float = 0.0
    # By how much longer a message takes while the backward pass runs: 0.5 is half as long again.
    # None: as the links say.
    contention: float | None = None
    # Whether the engine negotiates at once for all that waits, and fuses the allreduces among them,
    # as Horovod does, up to the bytes of its buffer. None: as the links say.
    fuses: bool | None = None
    # Seconds of loading a batch on the cores of the host, >= 0, during the step before.
    loading_s: float = 0.0
    # Compute time of one node over that of the others, >= 1.
    slow_node: float = 1.0
    # Rate of one node's port over that of the others, in (0, 1].
    slow_port: float = 1.0
    # Largest share of a port's rate that is missing in a step, in [0, 1); see `disturbed_links`.
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_name("place of the selection", self.selection_on, ("compute", "beside"))
        for name in ("engine_s", "spread", "contention", "loading_s"):
            value = getattr(self, name)
            if value is None and name in ("engine_s", "contention"):
                continue
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigurationError(f"`{name}` must be >= 0. Received {name}={value!r}.")
        slow_node, slow_port, jitter = self.slow_node, self.slow_port, self.jitter
        if not (1 <= slow_node < math.inf and 0 < slow_port <= 1 and 0 <= jitter < 1):
            raise ConfigurationError(
                "`slow_node` must be >= 1, `slow_port` in (0, 1] and `jitter` in [0, 1). Received "
                f"{slow_node=}, {slow_port=}, {jitter=}."
            )

    def on(self, links: Links) -> Assumptions:
        """Return these assumptions, with what the links say where these say nothing.

        >>> from tfcommx.core import NOMINAL
        >>> Assumptions(contention=0.5).on(NOMINAL._replace(engine_s=1e-3, contention=2.0))
        Assumptions(selection=None, selection_on='compute', engine_s=0.001, ports_together=False,
                   spread=0.0, contention=0.5, fuses=False, loading_s=0.0, slow_node=1.0,
                   slow_port=1.0, jitter=0.0)
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

    def slowest_on(self, topology: Topology) -> float:
        """Return the same over the ranks of a cluster: one of the slow node, or any other.

        >>> Assumptions(slow_node=1.5).slowest_on(Topology(4, 2))
        1.5
        """
        return max(self.slowest(topology.size), self.slow_node * self.slowest(topology.slots))


IDEAL = Assumptions()


# Halvings of the range in which the slowest rate lies: below the rounding of a float
HALVINGS = 60


def slowest_rate(nodes: int, assumptions: Assumptions, quantile: float = 0.5) -> float:
    """Return the rate of the slowest port in a step, over the rate that the links give a port.

    >>> slowest_rate(1, Assumptions(jitter=0.5)), slowest_rate(4, Assumptions(slow_port=0.4))
    (0.75, 0.4)

    Args:
        nodes: of the cluster, >= 1.
        assumptions: `slow_port` and `jitter` of them.
        quantile: of the steps, from the fastest ports to the slowest ones, in [0, 1].
    """
    slow, jitter = assumptions.slow_port, assumptions.jitter
    if not jitter:
        return slow

    def chance(rate: float) -> float:
        others = min((1 - rate) / jitter, 1.0) ** (nodes - 1)
        return (1 - rate / slow) / jitter * others

    low, high = slow * (1 - jitter), slow
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) > quantile else (low, middle)
    return (low + high) / 2


def disturbed_links(
    links: Links, topology: Topology, assumptions: Assumptions, quantile: float = 0.5
) -> Links:
    """Return links whose port between nodes is the slowest one of a step.

    What short allreduces took in the probe grows by what the engine's price of them does.
    """
    rate = slowest_rate(topology.nodes, assumptions, quantile)
    if rate == 1 or topology.nodes == 1:
        return links
    beta = links.between.beta_s_per_byte / rate
    slower = links._replace(between=dataclasses.replace(links.between, beta_s_per_byte=beta))
    price = engines.get(links.engine.name).all_reduce
    points = [
        (size, seconds + price(size, topology, slower) - price(size, topology, links))
        for size, seconds in links.calibration.points
    ]
    return slower._replace(calibration=Calibration.of(links.calibration.ranks, points))
