"""Makes the plan: from a user's schemes to buckets, each with its route and k.

    gradients --streams--> those that may travel together --merging--> groups --> buckets

All that can be refused is refused here, before any collective.

Streams are sorted by scheme, route and dtype, and long gradients are cut. Fragments are groups of
variables with about equally many entries, each exchanged at its own step:

    variables  --fragment_of-->  F groups  --make_plan, each-->  one plan, no bucket of two groups
"""

import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfcommx import routes
from tfcommx.core import (
    AUTO,
    DENSE_CODES,
    DENSE_DTYPES,
    LARGEST,
    NARROW,
    NO_COMPRESSION,
    NOMINAL,
    PLAIN,
    Bucket,
    Links,
    Piece,
    Plan,
    PlanError,
    Profile,
    Scheme,
    Topology,
    log,
)
from tfcommx.planner import merging
from tfcommx.planner.check import DenseWay, SparseWay, Ways, check_scheme
from tfcommx.planner.prices import default_bucket_bytes, prices_of, sub_profile
from tfcommx.routes.compressed import vectors
from tfcommx.routes.messages import MessageOptions
from tfcommx.simulator.assumptions import IDEAL, Assumptions


def balance(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each item: the longest first, each to the rank that has least so far.

    >>> balance([6, 4, 3, 1], ranks=2)
    [0, 1, 1, 0]

    **Source:** Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): the rank that has most
    has at most 4/3 of its load in the best partition.
    """
    owners, loads = [0] * len(costs), [0.0] * ranks
    # The sort is stable, and the first of several minima counts, so all ranks divide equally
    for position in sorted(range(len(costs)), key=lambda position: -costs[position]):
        owners[position] = loads.index(min(loads))
        loads[owners[position]] += costs[position]
    return owners


class Gradient(NamedTuple):
    """The properties of a variable's gradient that a plan depends on."""

    # Path of the variable.
    path: str
    shape: tuple[int, ...]
    # Name of the dtype.
    dtype: str

    @property
    def entries(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


class Stream(NamedTuple):
    """Gradients that may travel together."""

    scheme: Scheme
    way: DenseWay | SparseWay
    # Dtype of the flat vectors.
    dtype: str

    @property
    def compression(self) -> str:
        """The compression to shorter vectors, which travel in place of the entries."""
        return NO_COMPRESSION if isinstance(self.way, SparseWay) else self.way.compression


# Position of a variable in backward order, and its gradient or a piece of it.
Member = tuple[int, Gradient]


def sort_into_streams(
    gradients: Sequence[Gradient],
    schemes: Mapping[str, Scheme],
    ways: Mapping[Scheme, Ways],
    largest: int,
) -> dict[Stream, list[Member]]:
    """Group the gradients, in backward order, by scheme, way and dtype; cut long ones."""
    streams: dict[Stream, list[Member]] = {}
    for order, gradient in enumerate(reversed(gradients)):
        scheme = scheme_of(gradient.path, schemes)
        stream = _stream_of(gradient, scheme, ways[scheme])
        pieces = _cut(gradient, largest) if isinstance(stream.way, SparseWay) else [gradient]
        streams.setdefault(stream, []).extend((order, piece) for piece in pieces)
    return streams


def _stream_of(gradient: Gradient, scheme: Scheme, ways: Ways) -> Stream:
    if gradient.dtype.startswith("complex"):
        raise PlanError(
            f"Real gradients are required. Received {gradient.dtype} for {gradient.path!r}. "
            "Train its real and its imaginary part as two variables."
        )
    if not gradient.entries:  # There is nothing to select or to write in fewer bits
        return Stream(scheme, DenseWay(routes.DENSE["allreduce"], PLAIN), "float32")
    if ways.sparse:
        small = len(gradient.shape) <= 1 or gradient.entries < scheme.dense_below
        # Residuals are float32, and would lose the lower bits of a float64
        if not small and gradient.dtype != "float64":
            return Stream(scheme, ways.sparse, "float32")
    compresses = ways.dense.compression != NO_COMPRESSION or ways.dense.wire in DENSE_CODES
    is_native = gradient.dtype in DENSE_DTYPES and not (compresses and gradient.dtype != "float64")
    dtype = gradient.dtype if is_native else "float32"
    return Stream(scheme, ways.dense, dtype)


def scheme_of(path: str, schemes: Mapping[str, Scheme]) -> Scheme:
    """Return the scheme of the first pattern that matches a variable's path.

    >>> scheme_of("dense/kernel", {"*kernel": Scheme("asa"), "*": Scheme()}).route
    'asa'

    **Raises:** PlanError if none matches.
    """
    for pattern, scheme in schemes.items():
        if matches(path, pattern):
            return scheme
    raise PlanError(
        f"No scheme for the variable {path!r}: none of the patterns {list(schemes)} matches. Add "
        "the pattern '*'."
    )


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern matches a variable.

    A variable whose path another one has, too, has a number after its name.
    """
    return fnmatch.fnmatchcase(re.sub(r"#\d+$", "", name), pattern)


def _cut(gradient: Gradient, largest: int) -> list[Gradient]:
    """Cut a gradient into pieces of equal length, of at most `largest` entries."""
    size = gradient.entries
    if size <= largest:
        return [gradient]
    count = -(-size // largest)
    # Ends are rounded down, so lengths differ by one entry at most
    ends = [size * piece // count for piece in range(count + 1)]
    return [
        Gradient(Piece(gradient.path, start, stop).name, (stop - start,), gradient.dtype)
        for start, stop in itertools.pairwise(ends)
    ]


def fragment_of(entries: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the fragment of each variable: the longest first, each to that with least so far.

    >>> fragment_of({"a": 6, "b": 4, "c": 3}, 2)
    {'a': 0, 'b': 1, 'c': 1}

    **Raises:** PlanError for fewer variables than fragments.
    """
    if len(entries) < count:
        raise PlanError(
            f"Each fragment needs a variable. Received fragments={count} and {len(entries)} "
            "variables. Take fewer."
        )
    # Sorted by name, because callers list the variables in different orders
    paths = sorted(entries)
    return dict(zip(paths, balance([entries[path] for path in paths], count), strict=True))


def plan_in_fragments(
    gradients: Sequence[Gradient], count: int, make: Callable[[Sequence[Gradient]], Plan]
) -> Plan:
    """Make a plan of which no bucket has variables of two of the `count` fragments.

    **Raises:** PlanError for fewer variables than fragments, and as `make` does.
    """
    if count == 1:
        return make(gradients)
    fragments = fragment_of({gradient.path: gradient.entries for gradient in gradients}, count)
    parts = [
        make([gradient for gradient in gradients if fragments[gradient.path] == part])
        for part in range(count)
    ]
    buckets = [bucket for part in parts for bucket in part.buckets]
    named = tuple(
        # Numbered anew, because each part begins at 0, and collectives meet by these names
        dataclasses.replace(bucket, name=f"tfcommx/bucket{number}")
        for number, bucket in enumerate(buckets)
    )
    return dataclasses.replace(parts[0], buckets=named)


def fragments_of_buckets(plan: Plan, count: int) -> list[Plan]:
    """Return the plan's buckets of each fragment.

    **Raises:** PlanError for a bucket of two fragments, in a plan that was made without them.
    """
    fragments_by_path = fragment_of(plan.entries, count)
    parts: list[list[Bucket]] = [[] for _ in range(count)]
    for bucket in plan.buckets:
        fragments = {fragments_by_path[Piece.of(name).path] for name in bucket.variables}
        if len(fragments) > 1:
            raise PlanError(
                f"Fragments need separate buckets. Received fragments={count} and a plan whose "
                f"{bucket.name} has variables of {len(fragments)} of them. Leave `plan` out, or "
                "take fragments=1."
            )
        parts[fragments.pop()].append(bucket)
    return [dataclasses.replace(plan, buckets=tuple(part)) for part in parts]


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
        links: the cost of messages, the same on every rank; the cheapest form of a route is
            planned.
        reduce_to_root: the sums are needed on rank 0 alone, as strategy "root" needs them; routes
            of messages reduce to it.
        largest: entries at which a bucket on a sparse route is closed, because indices are int32. A
            longer variable is cut into pieces of equal length; each has a separate
            selection and residual.
        profile: when gradients are ready, the same on every rank; a merging that goes by time
            needs it.
        assumptions: times of selections and of the engine, for such a merging.

    Returns:
        The plan; a pure function of the arguments, so equal on every rank with the same arguments.

    **Raises:** PlanError for an infeasible request, naming the scheme, variable or hosts.
    """
    ways = _check_schemes(schemes, gradients, topology)
    _check_times(schemes, profile)
    cluster = (topology, links, assumptions)
    # (position of its last gradient in backward order, bucket)
    ready: list[tuple[int, Bucket]] = []
    for stream, members in sort_into_streams(gradients, schemes, ways, largest).items():
        for chosen in _merged(stream, members, largest, cluster, profile):
            bucket = _bucket([gradient for _, gradient in chosen], stream, topology, links)
            ready.append((chosen[-1][0], bucket))
    # In the order in which they can be sent; the sort is stable, so equal on all ranks
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
) -> dict[Scheme, Ways]:
    """Refuse schemes that cannot be carried out; warn of a pattern that matches no variable."""
    ways: dict[Scheme, Ways] = {}
    for pattern, scheme in schemes.items():
        way = check_scheme(scheme, topology)
        if way is None:
            raise PlanError(
                f"A plan is made of schemes that name a route. Received {AUTO!r} for {pattern!r}, "
                "which DistributedOptimizer resolves. Give it the scheme, or see what "
                "`tfcommx plan` proposes."
            )
        ways[scheme] = way
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
    return ways


def _check_times(schemes: Mapping[str, Scheme], profile: Profile | None) -> None:
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
    compresses = stream.compression != NO_COMPRESSION
    topology, links, assumptions = cluster

    def make_bucket(entries: int) -> Bucket:
        # A compression needs matrices, and does best with square ones
        side = max(1, math.isqrt(entries)) if compresses else 1
        group = [Gradient("group", (entries // side, side), stream.dtype)]
        return _bucket(group, stream, topology, links)

    rows = sub_profile([gradient for _, gradient in members], profile)
    prices = prices_of(make_bucket, *cluster)
    if stream.scheme.merging == "threshold":
        most = prices.entry_bytes * largest if isinstance(stream.way, SparseWay) else math.inf
        limit = stream.scheme.bucket_bytes
        if limit is None:
            total = prices.entry_bytes * sum(gradient.entries for _, gradient in members)
            fuses = assumptions.on(links).fuses
            fused = bool(fuses) and stream.way.route.fused and not compresses
            priced = None if compresses else prices
            limit = default_bucket_bytes(priced, int(min(total, most)), fused)
        prices = dataclasses.replace(prices, bucket_bytes=int(min(limit, most)))
    positions = merging.get(stream.scheme.merging).groups(rows, prices)
    groups = [[members[position] for position in group] for group in positions]
    # `threshold` has closed its buckets before `largest` entries already
    if isinstance(stream.way, DenseWay) or stream.scheme.merging == "threshold":
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
    scheme, way = stream.scheme, stream.way
    route = way.route
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
    if isinstance(way, SparseWay):
        # That of any rank, because padding gives all shards one length
        start, stop = route.shard(bucket, topology, 0)
        # At least one: a small variable may be alone in its bucket.
        k = max(1, round(scheme.density * (stop - start)))
        bucket = dataclasses.replace(bucket, selection=scheme.selection, k=k, seed=scheme.seed)
    if stream.compression != NO_COMPRESSION:
        return _compressed(bucket, gradients, stream, topology, links)
    return route.cheapest(bucket, topology, links)


def _compressed(
    bucket: Bucket, gradients: list[Gradient], stream: Stream, topology: Topology, links: Links
) -> Bucket:
    """Let other vectors travel in place of the entries, if there is something to gain."""
    route, shapes = stream.way.route, tuple(tuple(gradient.shape) for gradient in gradients)
    compressed = dataclasses.replace(
        bucket, padding=0, compression=stream.compression, shapes=shapes
    )
    travelling = vectors(compressed, route, topology)
    is_shorter = sum(vector.size for vector in travelling) < bucket.size
    if not travelling or not is_shorter or bucket.dtype != "float32" or topology.size == 1:
        return route.cheapest(bucket, topology, links)
    # The longest vector decides for all, because it takes most of the time
    longest = max(travelling, key=lambda vector: vector.size)
    options = route.cheapest(longest, topology, links).options
    return dataclasses.replace(compressed, options=options)


def _wire(stream: Stream, topology: Topology) -> str:
    """Return the wire format of a stream: fewer bits only if it is of float32, and travels."""
    wire = stream.way.wire
    as_it_is = stream.dtype != "float32" or topology.size == 1
    return PLAIN if wire in NARROW and as_it_is else wire


def _reduced_to_root(bucket: Bucket) -> Bucket:
    """Let messages make the sum on rank 0 only; the engine's collectives have no reduce."""
    # A compression needs its sums on all ranks
    if bucket.compresses or not isinstance(bucket.options, MessageOptions):
        return bucket
    options = dataclasses.replace(bucket.options, collective="reduce")
    return dataclasses.replace(bucket, options=options)
