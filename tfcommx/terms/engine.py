"""EngineSettings: which engine carries collectives out, and how it was set."""

from __future__ import annotations

import math
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
