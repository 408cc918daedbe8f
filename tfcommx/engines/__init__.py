"""Price the collectives of the engines under Horovod: one engine a file, and their table.

engine    the base class, whose collectives are rings; the wires inside a node; `Calibrated`, an
          engine with measured collectives
ring      the identity: prices of the papers
nccl gloo open_mpi hierarchical   their algorithms, and their choice by bytes and ranks

Routes ask the engine of the links for the price of each collective, so the price of a plan depends
on the engine. Prices need neither TensorFlow nor the engine.

To add an engine:
    1. Write the file: a class derived from `engine.Engine`, with the collectives that are not
       rings. Its docstring names the source of its algorithms and of its choice among them.
    2. Add its ENGINE to `_ALL` below, and to the list in docs/how-to/simulate-and-plan.md.
    tests/engines walks over the table.
"""

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
    """Return the engine of some links, with their calibration if they have one."""
    engine = get(links.engine.name)
    measured = links.calibration.points or links.calibration.gathers
    return Calibrated(engine, links) if measured else engine


def gather_seconds(own_bytes: float, group: str, topology: Topology, links: Links) -> float:
    """Price an all-gather within a group, including the engine's overhead, in seconds.

    >>> from tfcommx.core import Link
    >>> links = Links(Link(1.0, 0.5), Link(10.0, 5.0), engine_s=0.25)
    >>> gather_seconds(8, "node", Topology(2, 2), links)
    5.25

    Args:
        own_bytes: bytes from each rank.
        group: "world", "node" or "peers", whose slots share a port.
        topology, links: topology and links of the whole cluster.
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
