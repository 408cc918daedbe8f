"""What a slow node and ports of varying rate make of a step: all ranks wait for the slowest.

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

import dataclasses

from tfcommx import engines
from tfcommx.simulator.assumptions import Assumptions
from tfcommx.terms import Calibration, Links, Topology

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
