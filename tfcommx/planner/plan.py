"""Makes the plan: from the schemes that a user asks for to buckets, each with its route and k.

    gradients --streams--> those that may travel together --merging--> groups --> buckets

All that can be refused is refused here, before any collective.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence

from tfcommx.planner import merging
from tfcommx.planner.check import check_scheme, wire_of
from tfcommx.planner.prices import prices_of, sub_profile
from tfcommx.planner.streams import (
    DENSE_DTYPES,
    Gradient,
    Member,
    Stream,
    matches,
    sort_into_streams,
)
from tfcommx.routes.compressed import vectors
from tfcommx.routes.messages import MessageOptions
from tfcommx.simulator.assumptions import IDEAL, Assumptions
from tfcommx.terms import (
    AUTO,
    LARGEST,
    NARROW,
    NO_COMPRESSION,
    NOMINAL,
    PLAIN,
    Bucket,
    Links,
    Plan,
    PlanError,
    Profile,
    Scheme,
    Topology,
)

log = logging.getLogger("tfcommx")


__all__ = ["Gradient", "make_plan"]


def make_plan(
    gradients: Sequence[Gradient],
    schemes: Mapping[str, Scheme],
    topology: Topology,
    operation: str = "average",
    links: Links = NOMINAL,
    reduce_to_root: bool = False,
    largest: int = LARGEST,
    profile: Profile | None = None,
    assumptions: Assumptions = IDEAL,
) -> Plan:
    """Assign each gradient to a bucket, in backward order: by scheme, merged as the scheme asks.

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
        profile: when gradients are ready, the same on every rank; a merging that goes by time
            needs it.
        assumptions: what selections and the engine take, for such a merging.

    Returns:
        The plan; a pure function of the arguments, so equal on every rank that asks the same.

    **Raises:** PlanError for what cannot be carried out, naming the scheme, variable or hosts.
    """
    _check_schemes(schemes, gradients, topology)
    _check_times(schemes, profile)
    cluster = (topology, links, assumptions)
    # (position of its last gradient in backward order, bucket)
    ready: list[tuple[int, Bucket]] = []
    for stream, members in sort_into_streams(gradients, schemes, largest).items():
        for chosen in _merged(stream, members, largest, cluster, profile):
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
        if scheme.route == AUTO:
            raise PlanError(
                f"A plan is made of schemes that name a route. Received {AUTO!r} for {pattern!r}, "
                "which DistributedOptimizer resolves. Give it the scheme, or see what "
                "`tfcommx plan` proposes."
            )
        if pattern == "*" or not gradients:
            continue
        if not any(matches(gradient.path, pattern) for gradient in gradients):
            log.warning(
                "The pattern %r matches none of the %d variables with gradients, such as %r. "
                "Patterns are of whole paths: '*embedding*'.",
                pattern,
                len(gradients),
                gradients[0].path,
            )


def _check_times(schemes: Mapping[str, Scheme], profile: Profile | None) -> None:
    """Refuse a merging that goes by time if nobody knows the times."""
    for pattern, scheme in schemes.items():
        if merging.get(scheme.merging).needs_times and (profile is None or not profile.timed):
            by_size = [name for name, solver in merging.MERGINGS.items() if not solver.needs_times]
            raise PlanError(
                f"The merging {scheme.merging!r} (scheme of {pattern!r}) needs a profile that says "
                "when gradients are ready, and links that were measured: make the plan from "
                "them (`tfcommx plan PROFILE --links FILE --output PLAN`) and give the optimizer "
                "that, or give make_plan `profile=`. "
                f"Received {'none' if profile is None else 'one with sizes only'}. Without it "
                f"gradients can be merged by size: {', '.join(by_size)}."
            )


def _merged(
    stream: Stream,
    members: list[Member],
    largest: int,
    cluster: tuple[Topology, Links, Assumptions],
    profile: Profile | None,
) -> list[list[Member]]:
    """Decide which gradients of a stream travel together."""
    limit = stream.scheme.bucket_bytes
    if stream.route.sparse:
        limit = min(limit, DENSE_DTYPES[stream.dtype] * largest)

    def make_bucket(entries: int) -> Bucket:
        # A compression needs matrices, and does best with square ones
        side = math.isqrt(entries) if stream.scheme.compression != NO_COMPRESSION else 1
        group = [Gradient("group", (entries // side, side), stream.dtype)]
        return _bucket(group, stream, *cluster[:2])

    rows = sub_profile([gradient for _, gradient in members], profile)
    prices = prices_of(make_bucket, *cluster, limit)
    found = merging.get(stream.scheme.merging).groups(rows, prices)
    groups = [[members[position] for position in group] for group in found]
    if not stream.route.sparse or stream.scheme.merging == "threshold":
        return groups
    return [part for group in groups for part in _split_long(group, largest)]


def _split_long(group: list[Member], largest: int) -> list[list[Member]]:
    """Split a group on a sparse route where the next gradient would make it too long."""
    parts: list[list[Member]] = [[]]
    size = 0
    for member in group:
        if parts[-1] and size + member[1].entries > largest:
            parts.append([])
            size = 0
        parts[-1].append(member)
        size += member[1].entries
    return parts


def _bucket(gradients: list[Gradient], stream: Stream, topology: Topology, links: Links) -> Bucket:
    """Make the bucket of some gradients, without its name."""
    scheme, route = stream.scheme, stream.route
    sizes = tuple(gradient.entries for gradient in gradients)
    wire = _wire(stream, topology)
    bucket = Bucket(
        "",
        tuple(gradient.path for gradient in gradients),
        sizes,
        stream.dtype,
        route.name,
        padding=route.padding(sum(sizes), wire, topology),
        wire=wire,
        options=route.options(scheme, links),
        momentum=float(scheme.momentum),
        clip_norm=scheme.clip_norm,
    )
    if route.sparse:
        start, stop = route.shard(bucket, topology, 0)
        # At least one: a small variable may be alone in its bucket.
        k = max(1, round(scheme.density * (stop - start)))
        bucket = dataclasses.replace(bucket, selection=scheme.selection, k=k, seed=scheme.seed)
    if scheme.compression != NO_COMPRESSION:
        return _compressed(bucket, gradients, stream, topology, links)
    return route.cheapest(bucket, topology, links)


def _compressed(
    bucket: Bucket,
    gradients: list[Gradient],
    stream: Stream,
    topology: Topology,
    links: Links,
) -> Bucket:
    """Let other vectors travel in place of the entries, if there is something to gain."""
    found = dataclasses.replace(
        bucket,
        padding=0,
        compression=stream.scheme.compression,
        shapes=tuple(tuple(gradient.shape) for gradient in gradients),
    )
    travelling = vectors(found, stream.route, topology)
    is_shorter = sum(one.size for one in travelling) < bucket.size
    if not travelling or not is_shorter or bucket.dtype != "float32" or topology.size == 1:
        return stream.route.cheapest(bucket, topology, links)
    longest = max(travelling, key=lambda one: one.size)
    return dataclasses.replace(
        found, options=stream.route.cheapest(longest, topology, links).options
    )


def _wire(stream: Stream, topology: Topology) -> str:
    """Return how a stream is written: in 16 bits only if it is of float32, and travels."""
    wire = wire_of(stream.scheme, stream.route)
    as_it_is = stream.dtype != "float32" or topology.size == 1
    return PLAIN if wire in NARROW and as_it_is else wire


def _reduced_to_root(bucket: Bucket) -> Bucket:
    """Let messages make the sum on rank 0 only; the engine's collectives have no reduce.

    A compression needs its sums on all ranks.
    """
    if bucket.compresses or not isinstance(bucket.options, MessageOptions):
        return bucket
    options = dataclasses.replace(bucket.options, collective="reduce")
    return dataclasses.replace(bucket, options=options)
