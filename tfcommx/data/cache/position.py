"""Finds the rank of this process and its launch, and states what is equal on all its ranks."""

from __future__ import annotations

from collections.abc import Mapping

from tfcommx.comm import launcher, process
from tfcommx.comm.comparisons import Facts
from tfcommx.terms import PlanError, Topology


def find_position(topology: Topology | None, rank: int | None) -> tuple[Topology, int]:
    """Return the topology and this process's rank: of the running launch, unless both are given.

    A process that no launcher started, without `tfcommx.init()`, is alone.

    **Raises:** PlanError if a launcher started several processes and `tfcommx.init()` was not
    called.
    """
    if topology is None and process.started():
        comm = process.current()
        topology, rank = comm.topology, comm.rank if rank is None else rank
    elif topology is None and (size := launcher.launcher().size) > 1:
        raise PlanError(
            f"tfcommx.init() must be called before a DataCache is made. Received {size} launched "
            "processes without it, each of which would serve all samples. Call it first, on "
            "every rank, or give `topology` and `rank`."
        )
    return topology or Topology(1, 1), rank or 0


def state_equal(
    topology: Topology, rank: int, kind: str, name: str, values: Mapping[str, str], remedy: str
) -> None:
    """State facts that are equal on all ranks of the running launch, if these ranks are meant.

    A cache of other ranks, as one that this process has for itself, is nobody else's concern.
    """
    if process.started() and (topology, rank) == (
        process.current().topology,
        process.current().rank,
    ):
        process.current().comparisons.state(Facts(kind, name, values, remedy))
