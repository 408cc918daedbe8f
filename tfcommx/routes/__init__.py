"""Routes, which decide how ranks exchange vectors: one route per file, and the table of routes.

`allreduce` is the identity: with the rule `all` it is plain Horovod.

A DenseRoute sends whole vectors, a SparseRoute selected entries. Each file has, in this order: its
options, if any; the class with `options`, `shard`, `run` and the prices `wire_bytes`, `port_bytes`
and `seconds`, as defined in `route`; and `ROUTE`, the one object of that class. A route made of
messages has a `schedule`, which is a pure function, and a price; `messages.MessageRoute` turns them
into a route. Routes receive a communicator, a codec and a selection, and import none of these,
because prices and plans need no TensorFlow.

To add one:
    1. Write the file: a class derived from `route.DenseRoute` or `route.SparseRoute`, or a schedule
       for a `MessageRoute`. The price belongs in the same file; docs/explanation/routes.md derives
       it.
    2. Add its ROUTE to `_DENSE` or `_SPARSE` below.
       A route of another package is named "module:MEMBER", and its `name` must be the same string.
    3. If it needs an option that no other route has, write a frozen class of options:
       `DenseRoute[ItsOptions]`, `options_type` and `options(scheme, links)`. A bucket carries them.
    The laws (tests/laws), the planner, the benchmark (`scripts/bench routes`) and the tests of
    the prices iterate over the table.
"""

from tfcommx.core import Bucket, Plan, PlanError, check_name, is_member, load_member
from tfcommx.routes import (
    allgather,
    allreduce,
    asa,
    bidirectional,
    compressed,
    hitopk,
    pipeline,
    torus,
    tree,
)
from tfcommx.routes.route import DenseRoute, Route, SparseRoute

_DENSE: tuple[DenseRoute, ...] = (
    allreduce.ROUTE,
    torus.ROUTE,
    asa.ROUTE,
    pipeline.ROUTE,
    tree.ROUTE,
    bidirectional.ROUTE,
)
_SPARSE: tuple[SparseRoute, ...] = (allgather.ROUTE, hitopk.ROUTE)
# Name -> route
DENSE = {route.name: route for route in _DENSE}
SPARSE = {route.name: route for route in _SPARSE}
ROUTES: dict[str, DenseRoute | SparseRoute] = {**DENSE, **SPARSE}


def get(name: str) -> DenseRoute | SparseRoute:
    """Return the route of a name, or the member given as "module:MEMBER".

    >>> get("hitopk").levels
    2

    **Raises:** ConfigurationError for an unknown name; it names the nearest one. PlanError for a
    member with another `name`.
    """
    if is_member(name):
        outside: DenseRoute | SparseRoute = load_member("route", name, DenseRoute, SparseRoute)
        if outside.name != name:
            raise PlanError(
                "A route's `name` must be what others find it by, because plans carry it. Received "
                f"{outside.name!r} of {name!r}. Set it to that."
            )
        return outside
    return ROUTES[check_name("route", name, ROUTES)]


def of(bucket: Bucket) -> Route:
    """Return the route of a bucket, with the prices of the vectors that it sends."""
    route = get(bucket.route)
    return compressed.CompressedRoute(route) if bucket.compresses else route


def read_plan(text: str) -> Plan:
    """Read a plan written by `Plan.to_json`, with the options of every route."""
    return Plan.from_json(text, lambda name, fields: get(name).options_type.from_dict(fields))
