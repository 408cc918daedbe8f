"""The laws of a compression."""

from __future__ import annotations

from tfcommx import compression
from tfcommx.terms import PlanError, Scheme
from tfcommx.testing import laws
from tfcommx.testing.laws import require

# Relative to the largest entry: products of float32
ROUNDING = 2e-5


def check_compression(name: str) -> None:
    """Hold a compression to its laws.

    Args:
        name: such as "powersgd/2", or "module:MEMBER", an object of a class that derives from
            `compression.base.Compression`.

    **Ranks:** none: everything runs in this process. **Cost:** some seconds.
    **Raises:** LawBroken; PlanError for a name that is none.
    """
    found = compression.get(name)
    shapes = list(laws.SHAPES.values())
    start, sizes = found.first_state(shapes), found.state_sizes(shapes)
    require(
        start.shape == (sum(sizes),) and len(sizes) == len(shapes),
        "`first_state` must have the entries that `state_sizes` counts for each variable.",
        repr(name),
        f"{start.shape} and {sizes} came for {shapes}.",
    )
    if not found.sums(shapes):
        raise PlanError(
            f"A compression that shortens the gradients of the shapes {shapes} is required. "
            f"Received {name!r}, whose `sums` are empty. Check one with smaller parts."
        )
    laws.check_traces(
        lambda state, *gradients: found.run(gradients, state, lambda vector: vector),
        repr(name),
        start.shape,
        *shapes,
    )
    for route in ("allreduce", "asa", "torus"):
        scheme = Scheme(route, compression=name, bucket_bytes=10**6)
        for topology in (*laws.ONE_LEVEL, *laws.TWO_LEVELS):
            plan = laws.plan_of(scheme, topology)
            where = f"{name!r} on {route!r}, {topology.nodes} x {topology.slots} ranks"
            require(
                topology.size == 1 or any(bucket.compresses for bucket in plan.buckets),
                "Fewer entries must travel than without it.",
                where,
                f"`sums` counts {found.sums(shapes)} for {shapes}.",
            )
            logs = laws.play(plan, laws.whole_numbers)
            laws.check_conservation(logs, where, ROUNDING)
            laws.check_agreement(laws.play(plan, laws.normal_numbers), where)
            laws.check_count(plan, logs, where)
        laws.check_non_finite(plan, where)
        laws.check_continues(plan, where)
