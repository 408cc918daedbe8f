"""Refuses schemes that cannot be carried out, before anything is sent."""

from collections.abc import Mapping
from typing import NamedTuple

from tfcommx import compression, routes, selection
from tfcommx.core import (
    AUTO,
    MPI_LAUNCH,
    NARROW,
    NO_COMPRESSION,
    PLAIN,
    Plan,
    PlanError,
    Scheme,
    Topology,
    check_name,
    is_member,
)
from tfcommx.planner import merging
from tfcommx.routes.route import DenseRoute, Route, SparseRoute
from tfcommx.routes.torus import PEER_ROUTES
from tfcommx.wire import formats


class DenseWay(NamedTuple):
    """How whole vectors travel, or those of a compression in their place."""

    route: DenseRoute
    # A format that the route writes
    wire: str
    compression: str = NO_COMPRESSION


class SparseWay(NamedTuple):
    """How selected entries travel."""

    route: SparseRoute
    # A format that the route writes
    wire: str


class Ways(NamedTuple):
    """The ways of a scheme that has passed the checks."""

    # None: nothing is selected
    sparse: SparseWay | None
    # Way of all variables, or of those that a sparse scheme leaves dense
    dense: DenseWay


def check_scheme(scheme: Scheme, topology: Topology, messages: bool = True) -> Ways | None:
    """Refuse a scheme whose names are unknown, or do not fit each other, the topology, the launch.

    Args:
        messages: can the launch send messages between two ranks? An MPI launch can.

    Returns:
        Its ways; None for the scheme "auto", which has yet to choose them.

    **Raises:** PlanError.
    """
    selection.check(scheme.selection)
    if scheme.compression != NO_COMPRESSION:
        compression.get(scheme.compression)
    if scheme.route == AUTO:
        _check_auto(scheme)
        return None
    if not is_member(scheme.route):
        # Not by `routes.get`, whose names lack "auto"
        check_name("route", scheme.route, (AUTO, *routes.ROUTES))
    ways = _ways(scheme)
    merging.get(scheme.merging)
    _check_peers(scheme)
    for name in (scheme.route, scheme.dense_route, scheme.peer_route):
        _check_cluster(routes.get(name), topology, messages)
    return ways


def require_coverage(plan: Plan, entries: Mapping[str, int]) -> None:
    """Refuse a plan unless it is for exactly these variables, path -> entries.

    **Raises:** PlanError.
    """
    planned = plan.entries
    if planned.keys() != entries.keys():
        extra = sorted(planned.keys() ^ entries.keys())[0]
        raise PlanError(
            f"The plan must cover exactly the variables with gradients. {extra!r} is only in "
            f"{'the plan' if extra in planned else 'the model'}. Make the plan from this model."
        )
    for path, count in entries.items():
        if planned[path] != count:
            raise PlanError(
                f"The plan must have the sizes of the model's variables. Received {planned[path]} "
                f"entries of {path!r}, which has {count}. Make the plan from this model."
            )


def _ways(scheme: Scheme) -> Ways:
    """Check the fields that depend on the kind of route, dense or sparse."""
    route, dense = routes.get(scheme.route), routes.get(scheme.dense_route)
    if isinstance(dense, SparseRoute):
        raise PlanError(
            f"`dense_route` must be a dense route ({', '.join(routes.DENSE)}). Received "
            f"{scheme.dense_route!r}."
        )
    if isinstance(route, SparseRoute):
        if scheme.compression != NO_COMPRESSION:
            raise PlanError(
                "A compression's vectors are summed by a dense route. Received compression="
                f"{scheme.compression!r} with route={scheme.route!r}. Use allreduce or torus."
            )
        sparse = SparseWay(route, _wire(route, "wire", scheme.wire))
        return Ways(sparse, DenseWay(dense, _wire(dense, "dense_wire", scheme.dense_wire)))
    if scheme.selection != "all":
        raise PlanError(
            f"Selection {scheme.selection!r} needs a sparse route ({', '.join(routes.SPARSE)}). "
            f"Received route={scheme.route!r}."
        )
    if scheme.dense_wire != PLAIN:
        raise PlanError(
            "`dense_wire` is the format of gradients that a sparse route sends dense. Received "
            f"dense_wire={scheme.dense_wire!r} with the route {scheme.route!r}, which is dense. "
            "Use `wire`."
        )
    return Ways(None, DenseWay(route, _wire(route, "wire", scheme.wire), scheme.compression))


def _wire(route: Route, name: str, wire: str) -> str:
    """Return the format that a route writes: the one that is asked for, or its plain one."""
    if wire == PLAIN:
        return route.wires[0]
    if is_member(wire) and isinstance(route, SparseRoute):
        formats.of_others(wire)
    elif wire not in route.wires:
        names = [
            other.name
            for other in routes.ROUTES.values()
            if wire in other.wires or (is_member(wire) and isinstance(other, SparseRoute))
        ]
        raise PlanError(
            f"The route {route.name!r} writes {', '.join(route.wires)}. Received {name}={wire!r}. "
            f"Use one of these, or a route that writes it: {', '.join(names)}."
        )
    return wire


def _check_auto(scheme: Scheme) -> None:
    """Refuse fields that `auto` sets itself, or that plain Horovod, its fallback, lacks."""
    plain = Scheme()
    for name in ("dense_route", "peer_route", "merging"):
        if getattr(scheme, name) != getattr(plain, name):
            raise PlanError(
                f'Scheme("auto") chooses `{name}` itself. Received {name}='
                f"{getattr(scheme, name)!r}. Leave it out, or name a route."
            )
    if scheme.momentum or scheme.clip_norm is not None:
        raise PlanError(
            'Scheme("auto") may choose to send everything, which needs no `momentum` and no '
            f"`clip_norm`. Received momentum={scheme.momentum}, clip_norm={scheme.clip_norm}. Give "
            "them to the Keras optimizer, or name a route."
        )
    wires = {wire for route in routes.SPARSE.values() for wire in route.wires}
    allowed: dict[str, tuple[str, ...]] = {"wire": NARROW, "dense_wire": ()}
    if scheme.selection != "all":
        formats_allowed = (scheme.wire,) if formats.of_others(scheme.wire) else tuple(sorted(wires))
        allowed = {"wire": formats_allowed, "dense_wire": NARROW}
    for name, formats_allowed in allowed.items():
        if getattr(scheme, name) not in (PLAIN, *formats_allowed):
            raise PlanError(
                'Scheme("auto") writes selected entries in a format of sparse routes (`wire`), and '
                "others unchanged or in at most 16 bits (`dense_wire`, or `wire` "
                f"without a selection). Received selection={scheme.selection!r} with "
                f"{name}={getattr(scheme, name)!r}. Leave it out, or take "
                f"{', '.join(formats_allowed) or 'a selection'}."
            )


def _check_peers(scheme: Scheme) -> None:
    routes.get(scheme.peer_route)
    if scheme.peer_route not in PEER_ROUTES:
        raise PlanError(
            f"`peer_route` must be one of {', '.join(PEER_ROUTES)}. Received {scheme.peer_route!r}."
        )
    if scheme.peer_route != "allreduce" and "torus" not in (scheme.route, scheme.dense_route):
        raise PlanError(
            f"`peer_route` is the torus's. Received peer_route={scheme.peer_route!r} with "
            f"route={scheme.route!r}."
        )
    narrow = scheme.wire in NARROW or scheme.dense_wire in NARROW
    if scheme.peer_route != "allreduce" and narrow:
        raise PlanError(
            "In 16 or fewer bits the torus sums among peers by the engine or by alltoall. Received "
            f"peer_route={scheme.peer_route!r} with wire={scheme.wire!r} and "
            f"dense_wire={scheme.dense_wire!r}. Leave one of them out."
        )


def _check_cluster(route: Route, topology: Topology, messages: bool) -> None:
    if route.levels == 2:
        topology.require_even(f"the two-level route {route.name!r}")
    if route.messages and not messages:
        raise PlanError(
            f"The route {route.name!r} sends messages between two ranks, which needs an MPI "
            f"launch: {MPI_LAUNCH}. Received a Gloo launch. Launch with MPI, or use allreduce, "
            "torus or asa."
        )
