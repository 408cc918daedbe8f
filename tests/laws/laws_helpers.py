"""Shared by the files of laws: topologies, schemes, gradients, and steps on p ranks as threads.

The steps, and the laws that hold for members of others too, are those of tfcommx.testing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from drawing import case, drawn

from tfcommx import routes, selection
from tfcommx.core import DENSE_CODES, NARROW, NO_COMPRESSION, Plan, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.testing import laws
from tfcommx.testing.laws import SHAPES

SEVERAL_RANKS = [
    Topology(2, 1),
    Topology(2, 2),
    Topology(3, 1),
    Topology(4, 2),
    Topology(1, 2),
]


TOPOLOGIES = [Topology(1, 1), *SEVERAL_RANKS, Topology(2, 4)]


UNLIKE = [Topology(2, 2), Topology(3, 1), Topology(1, 2)]


SPARSE = list(routes.SPARSE)


DENSE = list(routes.DENSE)


RULES = [name for name in selection.RULES if name != "all"]


def scheme(route: str, rule: str = "all", density: float = 1.0, wire: str = "plain") -> Scheme:
    """Return a scheme that makes several buckets, and several blocks, of SHAPES."""
    return Scheme(
        route, rule, density, dense_below=8, bucket_bytes=2000, wire=wire, block_bytes=600
    )


TORI = [
    dataclasses.replace(scheme("torus"), peer_route=name)
    for name, row in routes.ROUTES.items()
    if row.messages
]


SCHEMES = (
    [scheme(route) for route in routes.ROUTES]
    + TORI
    + [scheme(route, rule, 0.1) for route in SPARSE for rule in RULES]
)


# A rule of many TensorFlow ops, slow on threads; no route sees which rule has selected
SEARCHED = [one for one in SCHEMES if one.selection == "binary_search"]


# Every wire format of every sparse route; the plain ones are above
WIRED = [
    scheme(route, RULES[0], 0.1, wire) for route in SPARSE for wire in routes.get(route).wires[1:]
]


# Dense routes that write their entries narrower
LOSSY = [scheme(route, wire=wire) for route in DENSE for wire in routes.get(route).wires[1:]]


# Dense routes that sum the vectors of a compression; no matrix of SHAPES travels as it is
COMPRESSED = [
    dataclasses.replace(one, compression="powersgd/2") for one in [*map(scheme, DENSE), TORI[0]]
]


# The narrower ones of these, because their rounding errors are kept
ROUNDED = [one for one in LOSSY if one.wire in NARROW]


# The ones of these in codes: a code and its error add up to float32 rounding
CODED = [one for one in ROUNDED if one.wire in DENSE_CODES]


# The ones in 16 bits that add in float32; the engine's allreduce of float16 rounds each sum
ADDED_WIDE = [
    one for one in ROUNDED if one not in CODED and (one.route == "asa" or one.wire == "bfloat16")
]


def name_of(value: Any) -> str:
    """Return the name of a parameter in the name of its test."""
    if isinstance(value, Topology):
        return f"{value.nodes}x{value.slots}"
    if isinstance(value, Scheme):
        peers = [value.peer_route] * (value.peer_route != "allreduce")
        how = value.compression if value.compression != NO_COMPRESSION else value.selection
        return "-".join([value.route, how, value.wire, *peers])
    return str(value)


every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=name_of)


def with_topologies(
    schemes: list[Scheme], first: Topology, exhaustive: Sequence[Scheme] = ()
) -> pytest.MarkDecorator:
    """Give each scheme one topology of several ranks, in turn; all are exhaustive.

    Args:
        exhaustive: schemes of which all cases are.
        first: topology of the first scheme. It differs from law to law, because together the laws
            then try each scheme on several topologies. Law 1 tries each route on all.
    """
    place = SEVERAL_RANKS.index(first)
    turned = SEVERAL_RANKS[place:] + SEVERAL_RANKS[:place]
    others = [
        case(scheme, topology, kept=False)
        for scheme in (*schemes, *exhaustive)
        for topology in TOPOLOGIES
        if scheme in exhaustive or topology not in turned
    ]
    return pytest.mark.parametrize(
        ("scheme", "topology"), drawn(schemes, turned) + others, ids=name_of
    )


def gradients(rank: int, step: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return integers over 64: their sums are exact in float32 in any order."""
    return {path: value.astype(dtype) for path, value in laws.whole_numbers(rank, step).items()}


def fine_gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Return integers over 4096 of up to 18 bits, more than float16 has; their sums are exact."""
    numbers = np.random.default_rng([rank, step])
    return {
        path: (numbers.integers(-(2**18), 2**18, shape) / 4096).astype(np.float32)
        for path, shape in SHAPES.items()
    }


def plan_for(
    scheme: Scheme, topology: Topology, operation: str = "sum", dtype: str = "float32", **more: Any
) -> Plan:
    """Return the plan of SHAPES under one scheme."""
    return make_plan(
        [Gradient(path, shape, dtype) for path, shape in SHAPES.items()],
        {"*": scheme},
        topology,
        operation,
        **more,
    )


def residuals_of(running: PlanExecutor) -> dict[str, np.ndarray]:
    """Return this rank's residuals of every variable; zeros if there are none."""
    found = running.export().residuals
    return {
        path: found.get(path, np.zeros(np.prod(shape), np.float32))
        for path, shape in SHAPES.items()
    }


def play(plan: Plan, steps: int, source: laws.Source = gradients) -> list[list[laws.Step]]:
    """Run steps on every rank; return their records, by rank and step."""
    return laws.play(plan, source, steps)


MOVING = [
    Scheme(route, rule, 0.1, dense_below=8, bucket_bytes=2000, momentum=0.5)
    for route in SPARSE
    for rule in ("exact", "dgc")
]


def velocities(running: PlanExecutor) -> dict[str, np.ndarray]:
    """Return this rank's velocities of every variable; zeros if there are none."""
    found = running.export().velocities
    return {
        path: found.get(path, np.zeros(np.prod(shape), np.float32))
        for path, shape in SHAPES.items()
    }
