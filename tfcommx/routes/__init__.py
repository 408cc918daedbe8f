"""Who sends to whom: the table of routes. A new route is one file here and one row.

Each module has, in this order:
    shard(bucket, topology, rank) -> (start, stop): the part of the flat vector whose residual this
    rank keeps run(flat, bucket, comm, select) -> flat: the sum over all ranks, in the dtype that
    came wire_bytes(bucket, topology) -> Traffic: what one rank sends in a step, exactly, as the
    mean over ranks seconds(bucket, topology, links) -> float: the price
Routes of messages have before these a `schedule`: which message is sent when, a pure function.
Routes that do not load all nodes alike have `port_bytes(bucket, topology)`: the bytes through the
busiest port of a node.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from tfcommx.terms import (
    PLAIN,
    SPARSE_WIRES,
    VALUE_DTYPES,
    Bucket,
    PlanError,
    Scheme,
    Topology,
    check_name,
)


class RouteInfo(NamedTuple):
    """What the planner must know of a route without loading it."""

    # Sends selected entries; else the whole vector
    sparse: bool
    # 2: works on node and peer groups, and needs equally many slots on every node
    levels: int
    # Formats that it can write; the first one is its plain form
    wires: tuple[str, ...] = (PLAIN,)
    # How many equal parts the flat vector is cut into: none, slots or ranks
    shards: str = "none"
    # `run_list` takes the gradients as they are, without a flat copy
    whole: bool = False
    # Made of messages between two ranks, which need an MPI launch
    messages: bool = False


ROUTES = {
    "allreduce": RouteInfo(sparse=False, levels=1, whole=True),
    "torus": RouteInfo(sparse=False, levels=2, shards="slots"),
    "asa": RouteInfo(sparse=False, levels=1, wires=(PLAIN, *VALUE_DTYPES), shards="ranks"),
    "pipeline": RouteInfo(sparse=False, levels=1, messages=True),
    "tree": RouteInfo(sparse=False, levels=1, messages=True),
    "bidirectional": RouteInfo(sparse=False, levels=1, messages=True),
    "allgather": RouteInfo(sparse=True, levels=1, wires=SPARSE_WIRES),
    "hitopk": RouteInfo(sparse=True, levels=2, wires=SPARSE_WIRES, shards="slots"),
}


def info(name: str) -> RouteInfo:
    """Return what the planner must know of the route; refuse an unknown name with the
    nearest one.
    """
    return ROUTES[check_name("route", name, ROUTES)]


def route(name: str) -> ModuleType:
    """Return the route's module; refuse an unknown name with the nearest one."""
    return importlib.import_module(f"{__name__}.{check_name('route', name, ROUTES)}")


def padding(name: str, size: int, topology: Topology) -> int:
    """Return how many zeros must follow `size` entries so that the route can cut them in equal
    parts.
    """
    return -size % {"none": 1, "slots": topology.slots, "ranks": topology.size}[info(name).shards]


def port_bytes(bucket: Bucket, topology: Topology) -> float:
    """Return the bytes that a step sends through the busiest port of a node, in its busier
    direction.

    Rings and alltoalls load all nodes alike; where the nodes have unequal numbers of slots, this is
    their mean.
    """
    chosen = route(bucket.route)
    if hasattr(chosen, "port_bytes"):
        return chosen.port_bytes(bucket, topology)
    return chosen.wire_bytes(bucket, topology).between * topology.size / topology.nodes


def wire_of(scheme: Scheme, name: str) -> str:
    """Return the format that the route `name` writes under a scheme: the scheme's own on its route,
    else the plain one.

    **Raises:** PlanError for a format that the scheme's route cannot write.
    """
    known = info(name).wires
    if scheme.wire == PLAIN or name != scheme.route:
        return known[0]
    if scheme.wire not in known:
        raise PlanError(
            f"The route {name!r} writes {', '.join(known)}. Received wire={scheme.wire!r}. "
            f"Use one of these, or a route that writes it: "
            f"{', '.join(other for other, found in ROUTES.items() if scheme.wire in found.wires)}."
        )
    return scheme.wire
