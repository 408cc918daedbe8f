"""The position of this process: its rank, its node, and the run that it belongs to."""

from __future__ import annotations

import os
from typing import NamedTuple

from tfcommx.comm import launcher, process
from tfcommx.data.cache import order
from tfcommx.data.sources.base import key_of
from tfcommx.terms import PlanError, Topology


class Position(NamedTuple):
    """A process among all others."""

    topology: Topology
    rank: int
    # Number of its node, and its number on that node.
    node: int
    slot: int


def find_position(topology: Topology | None = None, rank: int | None = None) -> Position:
    """Find this process's position in the running launch, unless both are given.

    A process that no launcher started, without `tfcommx.init()`, is alone.

    **Raises:** PlanError if a launcher started several processes and `tfcommx.init()` was not
    called, or for a rank that the topology does not have.
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
    topology, rank = topology or Topology(1, 1), rank or 0
    return Position(topology, rank, *order.node_and_slot(topology, rank))


def slab_name(key: str, node: int, own: bool) -> str:
    """Return the name of a node's slab, without its ending.

    Args:
        key: of the contents.
        node: number of the node: several may stand on one machine.
        own: whether no other run may use it.

    **Raises:** PlanError with `own`, if the launcher gives the run no name.
    """
    name = f"tfcommx-{os.getuid()}-{key[:16]}-{node}"
    return f"{name}-{key_of((launcher.run_name(),))[:16]}" if own else name
