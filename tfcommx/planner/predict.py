"""What a step of a model would take on a cluster under a scheme: plan it, then simulate it."""

from __future__ import annotations

from typing import Any

from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.simulator.assumptions import Assumptions
from tfcommx.simulator.step import IDEAL, simulate
from tfcommx.terms import Links, Profile, Scheme, Timeline, Topology


def predict_step(
    profile: Profile,
    scheme: Scheme,
    topology: Topology,
    links: Links,
    assumptions: Assumptions = IDEAL,
) -> Timeline:
    """Return the timeline of a step in which every gradient travels by one scheme.

    Args:
        profile: of one rank, with times.
        scheme: how gradients travel, and which together.
        topology: of the cluster.
        links: what messages cost on it.
        assumptions: what else is assumed.

    **Raises:** PlanError for a scheme that the cluster cannot carry out.
    """
    gradients = [Gradient(row.name, row.shape, row.dtype) for row in reversed(profile.variables)]
    plan = make_plan(
        gradients, {"*": scheme}, topology, links=links, profile=profile, assumptions=assumptions
    )
    return simulate(plan, profile, links, assumptions)


def row_of(timeline: Timeline, scheme: Scheme, topology: Topology) -> dict[str, Any]:
    """Return the columns of a simulated step, in tables and in lines of JSON."""
    return {
        "scheme": scheme.route,
        "merging": scheme.merging,
        "nodes": topology.nodes,
        "slots": topology.slots,
        "step_seconds": timeline.step_s,
        "compute_seconds": timeline.compute_s,
        "exposed_seconds": timeline.exposed_s,
        "throughput": timeline.throughput,
        "scaling_efficiency": timeline.scaling_efficiency,
    }
