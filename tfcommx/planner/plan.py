"""From what a user asks for to what is done bucket by bucket. All that can be refused is refused
here, before any collective.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfcommx import routes, selection
from tfcommx.planner.merging.threshold import by_size
from tfcommx.terms import (
    LARGEST,
    MPI_LAUNCH,
    NOMINAL,
    Bucket,
    Links,
    Piece,
    Plan,
    PlanError,
    Scheme,
    Topology,
    check_name,
)

log = logging.getLogger("tfcommx")
# what the engine reduces; others travel as float32
DENSE_DTYPES = ("float16", "float32", "float64")


class Gradient(NamedTuple):
    """What the planner must know of a variable's gradient."""

    path: str
    shape: tuple[int, ...]
    dtype: str


def check_scheme(scheme: Scheme, topology: Topology, messages: bool = True) -> None:
    """Refuse a scheme whose names are unknown, do not fit each other, the topology, or the launch.

    `messages` tells whether the launch that will carry it out can send messages between two ranks
    (an MPI launch can).
    """
    routes.info(scheme.route)
    check_name("selection rule", scheme.selection, selection.RULES)
    if routes.info(scheme.dense_route).sparse:
        dense = ", ".join(name for name, row in routes.ROUTES.items() if not row.sparse)
        raise PlanError(
            f"`dense_route` must be a dense route ({dense}). Received {scheme.dense_route!r}."
        )
    if scheme.selection != "all" and not routes.info(scheme.route).sparse:
        sparse = ", ".join(name for name, row in routes.ROUTES.items() if row.sparse)
        raise PlanError(
            f"Selection {scheme.selection!r} needs a sparse route ({sparse}). Received "
            f"route={scheme.route!r}."
        )
    if scheme.peer_route != "allreduce" and not routes.info(scheme.peer_route).messages:
        among = ", ".join(
            ["allreduce", *(name for name, row in routes.ROUTES.items() if row.messages)]
        )
        raise PlanError(f"`peer_route` must be one of {among}. Received {scheme.peer_route!r}.")
    if scheme.peer_route != "allreduce" and "torus" not in (scheme.route, scheme.dense_route):
        raise PlanError(
            f"`peer_route` is the torus's. Received peer_route={scheme.peer_route!r} with "
            f"route={scheme.route!r}."
        )
    for name in (scheme.route, scheme.dense_route, scheme.peer_route):
        row = routes.info(name)
        if row.levels == 2:
            topology.require_even(f"the two-level route {name!r}")
        if row.messages and not messages:
            raise PlanError(
                f"The route {name!r} sends messages between two ranks, which needs an MPI "
                f"launch: {MPI_LAUNCH}. "
                "Received a Gloo launch. Launch with MPI, or use allreduce, torus or asa."
            )
    routes.wire_of(scheme, scheme.route)


def make_plan(
    gradients: Sequence[Gradient],
    schemes: Mapping[str, Scheme],
    topology: Topology,
    operation: str = "average",
    links: Links = NOMINAL,
    reduce_to_root: bool = False,
    largest: int = LARGEST,
) -> Plan:
    """Put each gradient into one bucket: in backward order, by scheme, merged up to a size.

    Args:
        gradients: in forward order, as the model lists its variables.
        schemes: pattern of variable paths (as in file names) -> scheme; the first match counts.
        topology: of the ranks that will carry it out.
        operation: "average" or "sum" over the ranks.
        largest: entries at which a bucket on a sparse route is closed, where indices are int32; a
            longer variable is cut in pieces of equal length, which select, and keep their
            residuals, each for itself.
        links: what messages cost, the same on every rank; where a route can go several ways, the
            cheapest is planned.
        reduce_to_root: the sums are needed on rank 0 alone, as strategy "root" needs them; routes
            of messages reduce to it.

    Returns:
        The plan; a pure function of the arguments, so equal on every rank that asks the same.

    **Raises:** PlanError for what cannot be carried out, naming the scheme, variable or hosts.
    """
    for pattern, scheme in schemes.items():
        check_scheme(scheme, topology)
        if (
            pattern != "*"
            and gradients
            and not any(_matches(gradient.path, pattern) for gradient in gradients)
        ):
            log.warning(
                "The pattern %r matches none of the %d variables with gradients, such as %r. "
                "Patterns are of whole paths: "
                "'*embedding*'.",
                pattern,
                len(gradients),
                gradients[0].path,
            )
    streams: dict[tuple[Scheme, str, str], list[tuple[int, Gradient]]] = {}
    for order, gradient in enumerate(reversed(gradients)):
        if gradient.dtype.startswith("complex"):
            raise PlanError(
                f"Real gradients are required. Received {gradient.dtype} for {gradient.path!r}. "
                "Train its real and its "
                "imaginary part as two variables."
            )
        scheme = _scheme_of(gradient.path, schemes)
        sparse = routes.info(scheme.route).sparse and gradient.dtype != "float64"
        small = len(gradient.shape) <= 1 or math.prod(gradient.shape) < scheme.dense_below
        route = (
            scheme.dense_route
            if routes.info(scheme.route).sparse and (small or not sparse)
            else scheme.route
        )
        dtype = gradient.dtype if route != scheme.route or not sparse else "float32"
        dtype = dtype if dtype in DENSE_DTYPES else "float32"
        pieces = _cut(gradient, largest) if routes.info(route).sparse else [gradient]
        streams.setdefault((scheme, route, dtype), []).extend((order, piece) for piece in pieces)
    ready: list[tuple[int, Bucket]] = []  # when its last gradient is there
    for (scheme, route, dtype), members in streams.items():
        entry = 2 if dtype == "float16" else 8 if dtype == "float64" else 4
        limit = (
            min(scheme.bucket_bytes, entry * largest)
            if routes.info(route).sparse
            else scheme.bucket_bytes
        )
        for group in by_size([entry * math.prod(gradient.shape) for _, gradient in members], limit):
            chosen = [members[position] for position in group]
            ready.append(
                (
                    chosen[-1][0],
                    _bucket(
                        [gradient for _, gradient in chosen], scheme, route, dtype, topology, links
                    ),
                )
            )
    ready.sort(key=lambda pair: pair[0])
    buckets = (
        dataclasses.replace(bucket, name=f"tfcommx/bucket{i}")
        for i, (_, bucket) in enumerate(ready)
    )
    if reduce_to_root:
        buckets = (
            dataclasses.replace(bucket, collective="reduce")
            if routes.info(bucket.route).messages
            else bucket
            for bucket in buckets
        )
    return Plan(tuple(buckets), topology, operation)


def _cut(gradient: Gradient, largest: int) -> list[Gradient]:
    size = math.prod(gradient.shape)
    if size <= largest:
        return [gradient]
    count = -(-size // largest)
    ends = [size * piece // count for piece in range(count + 1)]
    return [
        Gradient(Piece(gradient.path, start, stop).name, (stop - start,), gradient.dtype)
        for start, stop in itertools.pairwise(ends)
    ]


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a pattern means a variable, also one whose name has a number because another has
    the same path.
    """
    return fnmatch.fnmatchcase(re.sub(r"#\d+$", "", name), pattern)


def _scheme_of(path: str, schemes: Mapping[str, Scheme]) -> Scheme:
    for pattern, scheme in schemes.items():
        if _matches(path, pattern):
            return scheme
    raise PlanError(
        f"No scheme for the variable {path!r}: none of the patterns {list(schemes)} matches. Add "
        "the pattern '*'."
    )


def _bucket(
    gradients: list[Gradient],
    scheme: Scheme,
    route: str,
    dtype: str,
    topology: Topology,
    links: Links,
) -> Bucket:
    paths = tuple(gradient.path for gradient in gradients)
    sizes = tuple(math.prod(gradient.shape) for gradient in gradients)
    row = routes.info(route)
    padding, wire = routes.padding(route, sum(sizes), topology), routes.wire_of(scheme, route)
    plain = Bucket(
        "",
        paths,
        sizes,
        dtype,
        route,
        padding=padding,
        wire=wire,
        block_bytes=scheme.block_bytes or links.block_bytes,
        peer_route=scheme.peer_route if route == "torus" else "allreduce",
        momentum=float(scheme.momentum),
        clip_norm=scheme.clip_norm,
    )
    if not row.sparse:
        return plain
    start, stop = routes.route(route).shard(plain, topology, 0)
    # a small variable may be alone in its bucket
    k = max(1, round(scheme.density * (stop - start)))
    bucket = dataclasses.replace(plain, selection=scheme.selection, k=k, seed=scheme.seed)
    # of routes that can go several ways
    cheapest = getattr(routes.route(route), "cheapest", None)
    return cheapest(bucket, topology, links) if cheapest else bucket
