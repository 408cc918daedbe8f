"""From what a user asks for to what is done bucket by bucket.

All that can be refused is refused here, before any collective.
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

from tfcommx import routes
from tfcommx.planner import merging
from tfcommx.planner.check import check_scheme, wire_of
from tfcommx.routes.base import Route
from tfcommx.routes.messages import MessageOptions
from tfcommx.terms import (
    LARGEST,
    NOMINAL,
    Bucket,
    Links,
    Piece,
    Plan,
    PlanError,
    Scheme,
    Topology,
)

log = logging.getLogger("tfcommx")

# What the engine reduces, with the bytes of an entry; others travel as float32.
DENSE_DTYPES = {"float16": 2, "float32": 4, "float64": 8}


class Gradient(NamedTuple):
    """What the planner must know of a variable's gradient."""

    # Path of the variable.
    path: str
    shape: tuple[int, ...]
    # Name of the dtype.
    dtype: str

    @property
    def entries(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


class _Stream(NamedTuple):
    """Gradients that may travel together."""

    scheme: Scheme
    route: Route
    # Of the flat vectors.
    dtype: str


# Position of a variable in backward order, and its gradient or a piece of it.
_Member = tuple[int, Gradient]


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

    >>> plan = make_plan([Gradient("w", (8, 8), "float32")], {"*": Scheme()}, Topology(2, 2))
    >>> [(bucket.route, bucket.variables) for bucket in plan.buckets]
    [('allreduce', ('w',))]

    Args:
        gradients: in forward order, as the model lists its variables.
        schemes: pattern of variable paths (as in file names) -> scheme; the first match counts.
        topology: of the ranks that will carry it out.
        operation: "average" or "sum" over the ranks.
        links: what messages cost, the same on every rank; if a route can go several ways, the
            cheapest is planned.
        reduce_to_root: the sums are needed on rank 0 alone, as strategy "root" needs them; routes
            of messages reduce to it.
        largest: entries at which a bucket on a sparse route is closed, because indices are int32. A
            longer variable is cut into pieces of equal length; each selects and keeps its residual
            for itself.

    Returns:
        The plan; a pure function of the arguments, so equal on every rank that asks the same.

    **Raises:** PlanError for what cannot be carried out, naming the scheme, variable or hosts.
    """
    _check_schemes(schemes, gradients, topology)
    # (position of its last gradient in backward order, bucket)
    ready: list[tuple[int, Bucket]] = []
    for stream, members in _streams(gradients, schemes, largest).items():
        for chosen in _merged(stream, members, largest):
            bucket = _bucket([gradient for _, gradient in chosen], stream, topology, links)
            ready.append((chosen[-1][0], bucket))
    ready.sort(key=lambda pair: pair[0])
    buckets = tuple(
        dataclasses.replace(bucket, name=f"tfcommx/bucket{i}")
        for i, (_, bucket) in enumerate(ready)
    )
    if reduce_to_root:
        buckets = tuple(map(_reduced_to_root, buckets))
    return Plan(buckets, topology, operation)


def _check_schemes(
    schemes: Mapping[str, Scheme], gradients: Sequence[Gradient], topology: Topology
) -> None:
    """Refuse what cannot be carried out; warn of a pattern that matches no variable."""
    for pattern, scheme in schemes.items():
        check_scheme(scheme, topology)
        if pattern == "*" or not gradients:
            continue
        if not any(_matches(gradient.path, pattern) for gradient in gradients):
            log.warning(
                "The pattern %r matches none of the %d variables with gradients, such as %r. "
                "Patterns are of whole paths: '*embedding*'.",
                pattern,
                len(gradients),
                gradients[0].path,
            )


def _streams(
    gradients: Sequence[Gradient], schemes: Mapping[str, Scheme], largest: int
) -> dict[_Stream, list[_Member]]:
    """Sort the gradients, in backward order, by what may travel together."""
    streams: dict[_Stream, list[_Member]] = {}
    for order, gradient in enumerate(reversed(gradients)):
        stream = _stream_of(gradient, _scheme_of(gradient.path, schemes))
        pieces = _cut(gradient, largest) if stream.route.sparse else [gradient]
        streams.setdefault(stream, []).extend((order, piece) for piece in pieces)
    return streams


def _stream_of(gradient: Gradient, scheme: Scheme) -> _Stream:
    if gradient.dtype.startswith("complex"):
        raise PlanError(
            f"Real gradients are required. Received {gradient.dtype} for {gradient.path!r}. "
            "Train its real and its imaginary part as two variables."
        )
    route = routes.get(scheme.route)
    if route.sparse:
        small = len(gradient.shape) <= 1 or gradient.entries < scheme.dense_below
        if not small and gradient.dtype != "float64":
            return _Stream(scheme, route, "float32")
        route = routes.get(scheme.dense_route)
    dtype = gradient.dtype if gradient.dtype in DENSE_DTYPES else "float32"
    return _Stream(scheme, route, dtype)


def _scheme_of(path: str, schemes: Mapping[str, Scheme]) -> Scheme:
    for pattern, scheme in schemes.items():
        if _matches(path, pattern):
            return scheme
    raise PlanError(
        f"No scheme for the variable {path!r}: none of the patterns {list(schemes)} matches. Add "
        "the pattern '*'."
    )


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a pattern matches a variable.

    A variable whose path another one has, too, has a number after its name.
    """
    return fnmatch.fnmatchcase(re.sub(r"#\d+$", "", name), pattern)


def _cut(gradient: Gradient, largest: int) -> list[Gradient]:
    """Cut a gradient into pieces of equal length, of at most `largest` entries."""
    size = gradient.entries
    if size <= largest:
        return [gradient]
    count = -(-size // largest)
    ends = [size * piece // count for piece in range(count + 1)]
    return [
        Gradient(Piece(gradient.path, start, stop).name, (stop - start,), gradient.dtype)
        for start, stop in itertools.pairwise(ends)
    ]


def _merged(stream: _Stream, members: list[_Member], largest: int) -> list[list[_Member]]:
    """Decide which gradients of a stream travel together."""
    entry_bytes, limit = DENSE_DTYPES[stream.dtype], stream.scheme.bucket_bytes
    if stream.route.sparse:
        limit = min(limit, entry_bytes * largest)
    sizes = [entry_bytes * gradient.entries for _, gradient in members]
    groups = merging.get("threshold").groups(sizes, limit)
    return [[members[position] for position in group] for group in groups]


def _bucket(gradients: list[Gradient], stream: _Stream, topology: Topology, links: Links) -> Bucket:
    """Make the bucket of some gradients, without its name."""
    scheme, route = stream.scheme, stream.route
    sizes = tuple(gradient.entries for gradient in gradients)
    bucket = Bucket(
        "",
        tuple(gradient.path for gradient in gradients),
        sizes,
        stream.dtype,
        route.name,
        padding=_padding(route, sum(sizes), topology),
        wire=wire_of(scheme, route),
        options=route.options(scheme, links),
        momentum=float(scheme.momentum),
        clip_norm=scheme.clip_norm,
    )
    if route.sparse:
        start, stop = route.shard(bucket, topology, 0)
        # At least one: a small variable may be alone in its bucket.
        k = max(1, round(scheme.density * (stop - start)))
        bucket = dataclasses.replace(bucket, selection=scheme.selection, k=k, seed=scheme.seed)
    return route.cheapest(bucket, topology, links)


def _padding(route: Route, size: int, topology: Topology) -> int:
    """Count the zeros that must follow `size` entries so that the route can cut equal shards."""
    return -size % {"none": 1, "slots": topology.slots, "ranks": topology.size}[route.shards]


def _reduced_to_root(bucket: Bucket) -> Bucket:
    """Let messages make the sum on rank 0 only; the engine's collectives have no reduce."""
    if not isinstance(bucket.options, MessageOptions):
        return bucket
    options = dataclasses.replace(bucket.options, collective="reduce")
    return dataclasses.replace(bucket, options=options)
