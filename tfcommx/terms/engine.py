"""EngineSettings: which engine carries collectives out. Calibration: what that took, measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfcommx.terms.checks import PlanError, check_whole


@dataclass(frozen=True)
class EngineSettings:
    """What prices must know of the engine besides the links; `tfcommx.engines` has the prices.

    >>> EngineSettings("nccl", nics=2).name
    'nccl'
    """

    # In the table of `tfcommx.engines`. The default is no engine of its own: rings on an idle
    # network, as the papers price them.
    name: str = "ring"
    # Network adapters of a node, >= 1. The rate of a port is that of all of them together.
    nics: int = 1
    # What joins the ranks of a node, in the table of `engines.wiring`. It decides which latencies
    # NCCL assumes there.
    wiring: str = "nvlink"
    # Seconds between two looks of Horovod's background thread at what waits (HOROVOD_CYCLE_TIME),
    # >= 0. The default is one that looks all the time.
    cycle_s: float = 0.0
    # Bytes of the buffer in which allreduces are fused (HOROVOD_FUSION_THRESHOLD), >= 0, if the
    # links say that they are. Horovod's own default.
    fusion_bytes: int = 2**27

    def __post_init__(self) -> None:
        check_whole("nics", self.nics, least=1)
        check_whole("fusion_bytes", self.fusion_bytes, least=0)
        if not isinstance(self.cycle_s, int | float) or not 0 <= self.cycle_s < math.inf:
            raise PlanError(f"`cycle_s` must be >= 0. Received {self.cycle_s!r}.")


@dataclass(frozen=True)
class Calibration:
    """What an engine's allreduces of short vectors took in the probe.

    >>> Calibration.of(4, [(1024, 2e-4), (65536, 1e-4)]).points
    ((1024, 0.0001), (65536, 0.0001))
    """

    # That took part; 0: nothing was measured.
    ranks: int = 0
    # (bytes of the vector, seconds without the engine's own time), both ascending; two or more.
    points: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        sizes, seconds = [size for size, _ in self.points], [one for _, one in self.points]
        numbers = all(math.isfinite(one) for one in seconds)
        if self.points and not (
            numbers and sizes == sorted(set(sizes)) and [0, *seconds] == sorted([0, *seconds])
        ):
            raise PlanError(
                "A calibration needs sizes that grow and seconds >= 0 that do not fall. Received "
                f"{self.points}."
            )

    @staticmethod
    def of(ranks: int, measured: Sequence[tuple[int, float]]) -> Calibration:
        """Make one of measured times: a vector takes at most as long as a longer one took.

        Disturbances only lengthen times, so a longer vector's shorter time counts for both.
        """
        sizes = [size for size, _ in measured]
        backwards = [max(one, 0.0) for _, one in reversed(measured)]
        seconds = list(itertools.accumulate(backwards, min))[::-1]
        return Calibration(ranks, tuple(zip(sizes, seconds, strict=True)))
