"""Assumptions of a simulated step besides profile, plan and links.

The time of a selection is a function of the entries of the vector: a formula, or a measured curve.
A node may be slow, and the rates of ports may vary; all ranks wait for the slowest.

    port of node 0   |==========|          each step has new rates, uniform between (1 - jitter)
    port of node 1   |=======|             times a port's full rate and the full rate
    port of node 2   |================|    a collective ends when this one has carried its part

A step depends on the slowest port alone, whose rate r has a known distribution. With u uniform,

    P(slowest port >= r) = P(slow_port (1 - jitter u) >= r) P(1 - jitter u >= r)^(m - 1)

so the step at a quantile is simulated at that quantile of r, and no random numbers are drawn. A
port keeps its rate during a step. The plan does not take this into account, because it is made
before. If an engine sleeps for a cycle and then fuses the waiting messages, quantiles of the steps
are exact only to within a cycle, because a slower port may fuse more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tfcommx import engines
from tfcommx.core import (
    ConfigurationError,
    Links,
    Profile,
    Topology,
    check_name,
    check_number,
)
from tfcommx.core.links import not_falling

# Entries of a vector -> seconds of a selection from it
SelectionTime = Callable[[int], float]


def sorting_time(gamma: float, density: float = 1.0) -> SelectionTime:
    """Return the time of an exact selection: gamma density d log2 d for d entries.

    >>> sorting_time(1e-3, density=0.5)(1024)
    5.12

    Source: Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient
    Sparsification on GPUs" (2020), equation 10. The base of its logarithm is not stated; the
    authors' code has base 2, and no density.
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
    curve = sorted(dict(points).items())
    if not curve or curve[0][0] < 1:
        raise ConfigurationError(
            f"Times of vectors of >= 1 entry are required. Received {list(points)}."
        )
    sizes, times = zip(*curve, strict=True)

    def seconds(entries: int) -> float:
        nearest = min(max(entries, sizes[0]), sizes[-1])
        return float(np.interp(nearest, sizes, times) * entries / nearest)

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
    """Conditions of a simulated step; the defaults disturb nothing.

    >>> Assumptions(spread=0.1).slowest(1), round(Assumptions(spread=0.1).slowest(16), 3)
    (1.0, 1.177)
    """

    # Seconds of a selection by the entries of the vector; None: the links' gamma for each byte, as
    # in the price of hitopk (equation 8 of CommLib)
    selection: SelectionTime | None = None
    # Stream of selections: "compute" delays the backward pass; "beside" is a separate stream
    selection_on: str = "compute"
    # Seconds that the engine adds to the price of each collective, >= 0: negotiation and cycle.
    # None: the links' value
    engine_s: float | None = None
    # Standard deviation / mean of the ranks' compute times, >= 0. All ranks wait for the slowest
    spread: float = 0.0
    # Extra time of a message during the backward pass, as a share of its time, >= 0: 0.5 is half as
    # long again. None: the links' value
    contention: float | None = None
    # Whether the engine negotiates for all waiting messages together and fuses their allreduces, up
    # to the size of its buffer, as Horovod does. None: the links' value
    fuses: bool | None = None
    # Seconds to load a batch on the cores of the host during the step before, >= 0
    loading_s: float = 0.0
    # Compute time of one node over that of the others, >= 1
    slow_node: float = 1.0
    # Rate of one node's port over that of the others, in (0, 1]
    slow_port: float = 1.0
    # Largest share of a port's rate that can be missing in a step, in [0, 1); see `disturbed_links`
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_name("place of the selection", self.selection_on, ("compute", "beside"))
        for name in ("engine_s", "spread", "contention", "loading_s"):
            value = getattr(self, name)
            if value is not None or name in ("spread", "loading_s"):
                check_number(name, value, ">= 0")
        slow_node, slow_port, jitter = self.slow_node, self.slow_port, self.jitter
        if not (1 <= slow_node < math.inf and 0 < slow_port <= 1 and 0 <= jitter < 1):
            raise ConfigurationError(
                "`slow_node` must be >= 1, `slow_port` in (0, 1] and `jitter` in [0, 1). Received "
                f"{slow_node=}, {slow_port=}, {jitter=}."
            )

    def on(self, links: Links) -> Assumptions:
        """Return these assumptions, with the links' values in place of None.

        >>> from tfcommx.core import NOMINAL
        >>> Assumptions(contention=0.5).on(NOMINAL._replace(engine_s=1e-3, contention=2.0))
        Assumptions(selection=None, selection_on='compute', engine_s=0.001, spread=0.0,
                   contention=0.5, fuses=True, loading_s=0.0, slow_node=1.0, slow_port=1.0,
                   jitter=0.0)
        """
        values = {name: getattr(self, name) for name in ("engine_s", "contention", "fuses")}
        return dataclasses.replace(
            self,
            **{
                name: getattr(links, name) if value is None else value
                for name, value in values.items()
            },
        )

    def slowest(self, ranks: int) -> float:
        """Return the compute time of the slowest of `ranks` ranks over the mean.

        It is the expected maximum of that many normal variables, after Blom (1958).
        """
        if self.spread == 0 or ranks == 1:
            return 1.0
        return 1 + self.spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    def slowest_on(self, topology: Topology) -> float:
        """Return the compute time of a cluster's slowest rank, slow node included, over the mean.

        >>> Assumptions(slow_node=1.5).slowest_on(Topology(4, 2))
        1.5
        """
        return max(self.slowest(topology.size), self.slow_node * self.slowest(topology.slots))


IDEAL = Assumptions()


# Bisections for the slowest rate: enough to reach the rounding of a float
HALVINGS = 60


def slowest_rate(nodes: int, assumptions: Assumptions, quantile: float = 0.5) -> float:
    """Return the rate of the slowest port in a step, at a quantile of steps, over the links' rate.

    >>> slowest_rate(1, Assumptions(jitter=0.5)), slowest_rate(4, Assumptions(slow_port=0.4))
    (0.75, 0.4)
    """
    slow, jitter = assumptions.slow_port, assumptions.jitter
    if not jitter:
        return slow

    def chance(rate: float) -> float:
        ordinary_ports = min((1 - rate) / jitter, 1.0) ** (nodes - 1)
        return (1 - rate / slow) / jitter * ordinary_ports

    # The slow port limits the rate from above, and no port loses more than the jitter
    low, high = slow * (1 - jitter), slow
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) > quantile else (low, middle)
    return (low + high) / 2


def disturbed_links(
    links: Links, topology: Topology, assumptions: Assumptions, quantile: float = 0.5
) -> Links:
    """Return links whose port between nodes is the slowest one of a step.

    The probe's times of collectives grow by as much as the engine's price of them.
    """
    rate = slowest_rate(topology.nodes, assumptions, quantile)
    if rate == 1 or topology.nodes == 1:
        return links
    beta = links.between.beta_s_per_byte / rate
    slower = links._replace(between=dataclasses.replace(links.between, beta_s_per_byte=beta))
    price = engines.get(links.engine.name).all_reduce
    measured = links.calibration
    points = [
        (size, seconds + price(size, topology, slower) - price(size, topology, links))
        for size, seconds in measured.points
    ]
    gathers = [
        (sent, seconds + sent * (beta - links.between.beta_s_per_byte))
        for sent, seconds in measured.gathers
    ]
    curves = dataclasses.replace(measured, points=not_falling(points), gathers=not_falling(gathers))
    return slower._replace(calibration=curves)
