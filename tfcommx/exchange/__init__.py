"""Who sends to whom: the table of routes. A new route is one file here and one row.

Each module has, in this order:
    shard(bucket, topology, rank) -> (start, stop): the part of the flat vector whose residual this rank keeps
    run(flat, bucket, comm, select) -> flat: the sum over all ranks, in the dtype that came
    wire_bytes(bucket, topology) -> Traffic: what one rank sends in a step, exactly, as the mean over ranks
    seconds(bucket, topology, links) -> float: the price
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from tfcommx.terms import check_name


class Row(NamedTuple):
    """What the planner must know of a route without loading it."""

    sparse: bool  # sends selected entries; else the whole vector
    levels: int  # 2: works on node and peer groups, and needs equally many slots on every node


ROUTES = {
    "allreduce": Row(sparse=False, levels=1),
    "torus": Row(sparse=False, levels=2),
    "allgather": Row(sparse=True, levels=1),
    "hitopk": Row(sparse=True, levels=2),
}


def row(name: str) -> Row:
    """Return what the planner must know of the route; refuse an unknown name with the nearest one."""
    return ROUTES[check_name("route", name, ROUTES)]


def route(name: str) -> ModuleType:
    """Return the route's module; refuse an unknown name with the nearest one."""
    return importlib.import_module(f"{__name__}.{check_name('route', name, ROUTES)}")
