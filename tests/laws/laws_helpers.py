"""What the files of laws share: topologies, schemes, gradients, and steps on p ranks as threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from drawing import drawn

from tfcommx import routes, selection
from tfcommx.comm.base import Comm
from tfcommx.comm.threads import ThreadComm
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.terms import NARROW, NO_COMPRESSION, Plan, Scheme, Topology

ONE_LEVEL = [Topology(1, 1), Topology(2, 1), Topology(1, 2), Topology(3, 1)]


TWO_LEVELS = [Topology(2, 2), Topology(4, 2), Topology(2, 4)]


TOPOLOGIES = ONE_LEVEL + TWO_LEVELS


UNLIKE = [Topology(2, 2), Topology(3, 1), Topology(1, 2)]


# No length is divisible by 2 or 4
SHAPES = {"first/kernel": (37, 11), "first/bias": (11,), "last/kernel": (11, 53)}


SPARSE = [name for name, row in routes.ROUTES.items() if row.sparse]


DENSE = [name for name, row in routes.ROUTES.items() if not row.sparse]


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


# Of these the ones in 16 bits, whose rounding errors are kept
ROUNDED = [one for one in LOSSY if one.wire in NARROW]


# Of these the ones that add in float32; the engine's allreduce of float16 rounds each sum
ADDED_WIDE = [one for one in ROUNDED if one.route == "asa" or one.wire == "bfloat16"]


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


every_scheme = pytest.mark.parametrize("scheme", SCHEMES + WIRED + LOSSY, ids=name_of)


def with_topologies(schemes: list[Scheme]) -> pytest.MarkDecorator:
    """Give each scheme one topology of one level and one of two, in turn; all are exhaustive.

    Laws 1 and 4 try every route, and every scheme, on every topology.
    """
    return pytest.mark.parametrize(
        ("scheme", "topology"), drawn(schemes, ONE_LEVEL, TWO_LEVELS), ids=name_of
    )


def gradients(rank: int, step: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return integers over 64: their sums are exact in float32 in any order."""
    numbers = np.random.default_rng([rank, step])
    return {
        path: (numbers.integers(-999, 1000, shape) / 64).astype(dtype)
        for path, shape in SHAPES.items()
    }


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
    found = running.state().by_variable().residuals
    return {
        path: found.get(path, np.zeros(np.prod(shape), np.float32))
        for path, shape in SHAPES.items()
    }


def play(
    plan: Plan, steps: int, source: Callable[[int, int], dict] = gradients
) -> list[list[tuple[dict, dict, dict]]]:
    """Run steps on every rank.

    Returns:
        By rank and step: gradients, results, and the residuals after the step.
    """

    def work(comm: Comm) -> list[tuple[dict, dict, dict]]:
        running, log = PlanExecutor(plan, comm), []
        for step in range(steps):
            given = source(comm.rank, step)
            result = running.exchange({path: tf.constant(value) for path, value in given.items()})
            log.append(
                (
                    given,
                    {path: value.numpy() for path, value in result.items()},
                    residuals_of(running),
                )
            )
        return log

    return ThreadComm.run(plan.topology, work)


MOVING = [
    Scheme(route, rule, 0.1, dense_below=8, bucket_bytes=2000, momentum=0.5)
    for route in SPARSE
    for rule in ("exact", "dgc")
]


def velocities(running: PlanExecutor) -> dict[str, np.ndarray]:
    """Return this rank's velocities of every variable; zeros if there are none."""
    found = running.state().by_variable().velocities
    return {
        path: found.get(path, np.zeros(np.prod(shape), np.float32))
        for path, shape in SHAPES.items()
    }
