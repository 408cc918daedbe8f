"""An engine whose allreduce of all ranks was measured: a curve for short vectors, and not a line.

    seconds |                          . the engine's price from here on
            |                   o
            |            o                    o measured; straight lines between them
            |  o
            +-------------------------- bytes

Short allreduces take what neither alpha nor an algorithm's number of steps tells: the wake-up of
threads, an engine's switch of algorithm, a protocol's hand-shake.
"""

from __future__ import annotations

import bisect

from tfcommx.engines.base import Engine
from tfcommx.terms import Calibration, Links, Topology


class Calibrated(Engine):
    """The prices of an engine, with an allreduce of as many ranks as were measured by the curve."""

    def __init__(self, engine: Engine, calibration: Calibration) -> None:
        self.name, self.uses_all_nics = engine.name, engine.uses_all_nics
        self._engine, self._calibration = engine, calibration

    def all_reduce(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an allreduce by the curve, and beyond its last point by the engine from there."""
        price = self._engine.all_reduce
        if topology.size != self._calibration.ranks:
            return price(total_bytes, topology, links)
        sizes, seconds = zip(*self._calibration.points, strict=True)
        if total_bytes >= sizes[-1]:
            known = price(sizes[-1], topology, links)
            return seconds[-1] + price(total_bytes, topology, links) - known
        if total_bytes <= sizes[0]:
            return seconds[0]
        place = bisect.bisect(sizes, total_bytes)
        share = (total_bytes - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    def reduce_scatter(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price a reduce-scatter as the engine does."""
        return self._engine.reduce_scatter(total_bytes, topology, links)

    def all_gather(self, own_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-gather as the engine does."""
        return self._engine.all_gather(own_bytes, topology, links)

    def all_to_all(self, total_bytes: float, topology: Topology, links: Links) -> float:
        """Price an all-to-all as the engine does."""
        return self._engine.all_to_all(total_bytes, topology, links)
