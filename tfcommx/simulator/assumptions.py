"""What a simulated step assumes besides profile, plan and links."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import NormalDist

from tfcommx.simulator.selection_time import SelectionTime
from tfcommx.terms import Links, PlanError, Topology, check_name


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
    # Largest share of a port's rate that is missing in a step, in [0, 1); `disturbances` has more.
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_name("place of the selection", self.selection_on, ("compute", "beside"))
        for name in ("engine_s", "spread", "contention", "loading_s"):
            value = getattr(self, name)
            if value is None and name in ("engine_s", "contention"):
                continue
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise PlanError(f"`{name}` must be >= 0. Received {name}={value!r}.")
        slow_node, slow_port, jitter = self.slow_node, self.slow_port, self.jitter
        if not (1 <= slow_node < math.inf and 0 < slow_port <= 1 and 0 <= jitter < 1):
            raise PlanError(
                "`slow_node` must be >= 1, `slow_port` in (0, 1] and `jitter` in [0, 1). Received "
                f"{slow_node=}, {slow_port=}, {jitter=}."
            )

    def on(self, links: Links) -> Assumptions:
        """Return these assumptions, with what the links say where these say nothing.

        >>> from tfcommx.terms import NOMINAL
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
