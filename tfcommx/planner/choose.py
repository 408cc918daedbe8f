"""Which schemes can carry a model's gradients on a cluster, and what a step would take under each.

    asked for               tried
    selection "all"         every dense route of the cluster x mergings; nothing is lost
    in 16 bits              these, and every dense route that writes them; what is rounded is kept
    "mstopk" at a density   these, and every sparse route x mergings, with what stays dense on the
                            dense route that is notably faster alone, or Horovod's

Predictions only propose: measured times decide.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfcommx import routes
from tfcommx.planner.check import check_scheme
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.routes.torus import PEER_ROUTES
from tfcommx.simulator.assumptions import Assumptions
from tfcommx.simulator.step import IDEAL, simulate
from tfcommx.terms import (
    NARROW,
    PLAIN,
    Links,
    Plan,
    PlanError,
    Profile,
    Scheme,
    Timeline,
    Topology,
)

# Tried for every route; `optimal` takes seconds for a large model, and follows for the best routes.
QUICK_MERGINGS = ("threshold", "mg_wfbp", "single")
ROUTES_FOR_OPTIMAL = 2
# What sparse schemes leave dense travels by another route than plain Horovod's if a dense step is
# predicted to take at most this share of the best one by that
NOTABLY = 0.97


class Candidate(NamedTuple):
    """A scheme, its plan, and the step that is predicted under it."""

    scheme: Scheme
    plan: Plan
    timeline: Timeline

    @property
    def name(self) -> str:
        """Words for a table: route, peers' route, merging."""
        return name_of(self.scheme)

    @property
    def bytes_between(self) -> float:
        """Bytes that one rank sends to other nodes in a step, as the mean over the ranks."""
        return sum(
            routes.get(bucket.route).wire_bytes(bucket, self.plan.topology).between
            for bucket in self.plan.buckets
        )

    @property
    def residual_bytes(self) -> int:
        """Bytes that rank 0 keeps of what it has not sent: 4 for each entry that it selects from.

        Momentum correction keeps as many again.
        """
        kept = 0
        for bucket in self.plan.buckets:
            if bucket.keeps_residual:
                start, stop = routes.get(bucket.route).shard(bucket, self.plan.topology, 0)
                kept += 4 * (stop - start) * (2 if bucket.momentum else 1)
        return kept


def name_of(scheme: Scheme) -> str:
    """Return a scheme in a few words.

    >>> name_of(Scheme("torus", peer_route="pipeline", merging="single"))
    'torus (pipeline), single'
    """
    peers = f" ({scheme.peer_route})" if scheme.peer_route != "allreduce" else ""
    dense = f" + {scheme.dense_route}" if routes.get(scheme.route).sparse else ""
    if dense and scheme.dense_wire != PLAIN:
        dense += f" {scheme.dense_wire}"
    return f"{scheme.route}{peers}{dense}, {scheme.merging}"


def candidates(
    profile: Profile,
    topology: Topology,
    links: Links,
    asked: Scheme | None = None,
    messages: bool = False,
    assumptions: Assumptions = IDEAL,
    thorough: bool = True,
) -> list[Candidate]:
    """Plan and simulate every scheme that is as good as what is asked for; the fastest first.

    >>> from tfcommx.terms import NOMINAL, VariableProfile
    >>> profile = Profile("tiny", (VariableProfile("w", (8, 8), ready_s=0.01),), 0.01, 0.02, 8)
    >>> found = candidates(profile, Topology(2, 1), NOMINAL)
    >>> {candidate.scheme.selection for candidate in found}
    {'all'}

    Args:
        profile: of one rank, with times.
        topology: of the cluster.
        links: what messages cost on it.
        asked: with selection "all" (None: so): nothing but the order of additions may change.
            With another one: gradients may be selected by it at the scheme's density.
        messages: can the launch send messages between two ranks? An MPI launch can.
        assumptions: what else is assumed.
        thorough: also the merging `optimal`, of the best routes, which takes most of the time.

    Returns:
        At least one; equal predictions in the order of the table of routes, plain Horovod first.

    **Cost:** a plan and a simulated step for each; some seconds for a model of 500 variables.
    **Raises:** PlanError for a profile without times.
    """
    if not profile.timed:
        raise PlanError(
            "A profile that says when gradients are ready is required. Received one of "
            f"{profile.model!r} with sizes only. Measure it."
        )
    asked = asked or Scheme()
    work = _Work(profile, topology, links, assumptions, ROUTES_FOR_OPTIMAL if thorough else 0)
    dense = _ranked(work, _dense(asked, topology, messages))
    if asked.selection == "all":
        return dense
    plain_s = next(one.timeline.step_s for one in dense if one.scheme.route == Scheme().route)
    quickest = dense[0].scheme if dense[0].timeline.step_s <= NOTABLY * plain_s else Scheme()
    return sorted(
        [*dense, *_ranked(work, _sparse(asked, quickest, topology, messages))], key=_step_s
    )


class _Work(NamedTuple):
    """What predictions are made of."""

    profile: Profile
    topology: Topology
    links: Links
    assumptions: Assumptions
    routes_for_optimal: int = ROUTES_FOR_OPTIMAL

    def predict(self, scheme: Scheme) -> Candidate:
        """Plan and simulate."""
        rows = reversed(self.profile.variables)
        gradients = [Gradient(row.name, row.shape, row.dtype) for row in rows]
        plan = make_plan(
            gradients,
            {"*": scheme},
            self.topology,
            links=self.links,
            profile=self.profile,
            assumptions=self.assumptions,
        )
        return Candidate(scheme, plan, simulate(plan, self.profile, self.links, self.assumptions))


def _ranked(work: _Work, schemes: Sequence[Scheme]) -> list[Candidate]:
    """Predict each scheme with the quick mergings, and the best ones with the optimal one."""
    found = [
        work.predict(dataclasses.replace(scheme, merging=merging))
        for scheme in schemes
        for merging in QUICK_MERGINGS
    ]
    best: list[Scheme] = []
    for candidate in sorted(found, key=_step_s):
        plain = dataclasses.replace(candidate.scheme, merging="optimal")
        if plain not in best and len(best) < work.routes_for_optimal:
            best.append(plain)
    return sorted([*found, *map(work.predict, best)], key=_step_s)


def _step_s(candidate: Candidate) -> float:
    return candidate.timeline.step_s


def _dense(asked: Scheme, topology: Topology, messages: bool) -> list[Scheme]:
    """Return the schemes that select nothing, plain Horovod's first.

    Also in 16 bits if that is asked for.
    """
    plain = Scheme(bucket_bytes=asked.bucket_bytes, block_bytes=asked.block_bytes)
    narrow = asked.wire if asked.selection == "all" else asked.dense_wire
    tried = [
        dataclasses.replace(plain, route=name, peer_route=peers, wire=wire)
        for wire in (PLAIN, *([narrow] if narrow in NARROW else []))
        for name, route in routes.ROUTES.items()
        if not route.sparse
        for peers in (PEER_ROUTES if name == "torus" else ("allreduce",))
    ]
    return list(_possible(tried, topology, messages))


def _sparse(asked: Scheme, dense: Scheme, topology: Topology, messages: bool) -> list[Scheme]:
    """Return what is asked for on every sparse route; small variables travel as `dense` says."""
    tried = [
        dataclasses.replace(
            asked,
            route=name,
            dense_route=dense.route,
            dense_wire=dense.wire,
            peer_route=dense.peer_route,
        )
        for name, route in routes.ROUTES.items()
        if route.sparse
    ]
    return list(_possible(tried, topology, messages))


def _possible(schemes: Sequence[Scheme], topology: Topology, messages: bool) -> Iterator[Scheme]:
    """Leave out what the cluster or the launch cannot carry out, and what others do as well."""
    two_levels = topology.nodes > 1 and topology.slots > 1
    for scheme in schemes:
        route = routes.get(scheme.route)
        if route.levels == 2 and not route.sparse and not two_levels:
            continue  # Of the torus one level would be left, which is a route of its own
        with contextlib.suppress(PlanError):
            check_scheme(scheme, topology, messages)
            yield scheme


class Change(NamedTuple):
    """What a step would take if one thing were different."""

    what: str
    step_s: float
    # Samples per second of all ranks
    throughput: float


def what_helps(
    scheme: Scheme,
    profile: Profile,
    topology: Topology,
    links: Links,
    assumptions: Assumptions = IDEAL,
) -> list[Change]:
    """Simulate one change at a time: links twice as fast, fewer slots, half the density, ...

    The same arguments as of `candidates`. The first row is the step as it is.
    """
    between, inside = links.between, links.inside
    half = dataclasses.replace
    work = _Work(profile, topology, links, assumptions)
    changes = [("as it is", scheme, work)]
    if topology.nodes > 1:
        faster = links._replace(between=half(between, beta_s_per_byte=between.beta_s_per_byte / 2))
        sooner = links._replace(between=half(between, alpha_s=between.alpha_s / 2))
        changes.append(("twice the rate between nodes", scheme, work._replace(links=faster)))
        changes.append(("half the latency between nodes", scheme, work._replace(links=sooner)))
    if topology.slots > 1:
        faster = links._replace(inside=half(inside, beta_s_per_byte=inside.beta_s_per_byte / 2))
        changes.append(("twice the rate inside nodes", scheme, work._replace(links=faster)))
        fewer = half(topology, slots=topology.slots // 2, uneven=())
        changes.append(("half the slots a node", scheme, work._replace(topology=fewer)))
    if scheme.selection != "all":
        thinner = half(scheme, density=scheme.density / 2)
        changes.append(("half the density", thinner, work))
    changes.append(("twice the batch", scheme, work._replace(profile=_twice_the_batch(profile))))
    found = []
    for what, changed, under in changes:
        timeline = under.predict(changed).timeline
        found.append(Change(what, timeline.step_s, timeline.throughput))
    return found


def _twice_the_batch(profile: Profile) -> Profile:
    """Double the compute times; an update takes what it took."""
    rows = tuple(
        dataclasses.replace(row, ready_s=2 * row.ready_s, forward_s=2 * row.forward_s)
        for row in profile.variables
    )
    return dataclasses.replace(
        profile,
        variables=rows,
        forward_s=2 * profile.forward_s,
        backward_s=2 * profile.backward_s,
        batch=2 * profile.batch,
    )
