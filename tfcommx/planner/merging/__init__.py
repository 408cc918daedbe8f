"""Which gradients travel together: one solver a file, and the table of them.

Merging saves latency terms and costs overlap: a bucket is sent when its last gradient is ready.

To add one: write a file with a frozen class that has what `base.Merging` says, and `SOLVER`, its
one object; a pure function of its arguments without TensorFlow, whose docstring draws the timeline
and cites the paper. Add it to `_ALL` below. tests/planner/merging compares every member with all
merges of small models. `single`, `each` and `threshold` need sizes only; the others ask the profile
when gradients are ready.
"""

from __future__ import annotations

from tfcommx.planner.merging import each, mg_wfbp, omgs, optimal, single, threshold
from tfcommx.planner.merging.base import Merging
from tfcommx.terms import check_name

_ALL: tuple[Merging, ...] = (
    threshold.SOLVER,
    single.SOLVER,
    each.SOLVER,
    mg_wfbp.SOLVER,
    omgs.SOLVER,
    optimal.SOLVER,
)
MERGINGS: dict[str, Merging] = {solver.name: solver for solver in _ALL}


def get(name: str) -> Merging:
    """Return the solver of a name.

    >>> get("threshold").needs_times, get("optimal").needs_times
    (False, True)

    **Raises:** PlanError for an unknown name; it names the nearest one.
    """
    return MERGINGS[check_name("merging", name, MERGINGS)]
