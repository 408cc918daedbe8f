"""What the engines under Horovod do, and what that takes: one engine a file, and their table.

base      what an engine is; what is not its own is a ring
wiring    the wires inside a node
calibrated   one of them, with what its allreduces were measured to take
ring      the identity: prices of the papers
nccl gloo open_mpi hierarchical   their algorithms, and their choice by bytes and ranks

Routes ask the engine of the links for the price of each collective, so the same plan costs what the
engine at work makes of it. Prices need neither TensorFlow nor the engine.

To add one:
    1. Write the file: a class derived from `engine.Engine`, with the collectives that are no ring.
       Its docstring names the source of its algorithms and of its choice among them.
    2. Add its ENGINE to `_ALL` below, and to the list in docs/how-to/simulate-and-plan.md.
    tests/engines walks over the table.
"""

from __future__ import annotations

from tfcommx.core import Links, Topology, check_name
from tfcommx.engines import gloo, hierarchical, nccl, open_mpi, ring
from tfcommx.engines.engine import Calibrated, Engine

_ALL: tuple[Engine, ...] = (
    ring.ENGINE,
    nccl.ENGINE,
    gloo.ENGINE,
    open_mpi.ENGINE,
    open_mpi.ENGINE_1,
    hierarchical.ENGINE,
)
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}


def get(name: str) -> Engine:
    """Return the engine of a name.

    >>> get("gloo").uses_all_nics
    False

    **Raises:** ConfigurationError for an unknown name; it names the nearest one.
    """
    return ENGINES[check_name("engine", name, ENGINES)]


def of(links: Links) -> Engine:
    """Return the engine that carries collectives over some links, as far as measured."""
    engine = get(links.engine.name)
    return Calibrated(engine, links.calibration) if links.calibration.points else engine


def gather_seconds(own_bytes: float, group: str, topology: Topology, links: Links) -> float:
    """Price an all-gather within a group, and what the engine needs for it besides.

    >>> from tfcommx.core import Link
    >>> links = Links(Link(1.0, 0.5), Link(10.0, 5.0), engine_s=0.25)
    >>> gather_seconds(8, "node", Topology(2, 2), links)
    5.25

    Args:
        own_bytes: from each rank.
        group: "world", "node" or "peers", whose slots share a port.
        topology, links: of the whole cluster.
    """
    engine = of(links)
    if group == "node":
        topology = Topology(1, topology.slots)
    elif group == "peers":
        links = engine.shared_port(links, topology.slots)
        topology = Topology(topology.nodes, 1)
    if topology.size == 1:
        return 0.0
    return engine.all_gather(own_bytes, topology, links) + links.engine_s
