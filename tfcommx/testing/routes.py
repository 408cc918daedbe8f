"""The laws of a route."""

from __future__ import annotations

import numpy as np

from tfcommx import routes
from tfcommx.terms import NOMINAL, VALUE_DTYPES, Scheme
from tfcommx.testing import laws
from tfcommx.testing.laws import require


def check_route(name: str) -> None:
    """Hold a route to its laws, in every format that it writes.

    Args:
        name: of the table, or "module:MEMBER", an object of a class that derives from
            `routes.base.Route`.

    **Ranks:** none: everything runs in this process. **Cost:** some seconds.
    **Raises:** LawBroken; PlanError for a name that is none.
    """
    route = routes.get(name)
    selected = {"selection": "exact", "density": 0.1} if route.sparse else {}
    for wire in route.wires:
        scheme = Scheme(name, wire=wire, dense_below=8, bucket_bytes=2000, **selected)
        loses = not route.sparse and wire in VALUE_DTYPES[1:]
        for topology in (*laws.ONE_LEVEL, *laws.TWO_LEVELS):
            plan = laws.plan_of(scheme, topology)
            where = f"{name!r} writing {wire!r}, {topology.nodes} x {topology.slots} ranks"
            logs = laws.play(plan, laws.whole_numbers)
            # What an engine that adds in 16 bits rounds is lost
            laws.check_conservation(logs, where, tolerance=1e-2 if loses else 0.0)
            laws.check_agreement(laws.play(plan, laws.normal_numbers), where)
            laws.check_count(plan, logs, where)
            for bucket in plan.buckets:
                seconds = routes.of(bucket).seconds(bucket, topology, NOMINAL)
                require(
                    bool(np.isfinite(seconds) and (seconds > 0 or topology.size == 1)),
                    "A price must be > 0 seconds.",
                    where,
                    f"{seconds!r} came.",
                )
        laws.check_non_finite(plan, where)
        laws.check_continues(plan, where)
