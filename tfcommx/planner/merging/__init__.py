"""Which gradients travel together: one solver a file, and the table of them.

Merging saves latency terms and costs overlap: a bucket is sent when its last gradient is ready.

To add one: write a pure function (profile, prices) -> groups in a new file, without
TensorFlow, whose module docstring draws the timeline and cites the paper; add its row below.
tests/planner/merging compares every row with all merges of small models.
"""

from tfcommx.core import check_name
from tfcommx.planner.merging.heuristics import each, mg_wfbp, omgs, single, threshold
from tfcommx.planner.merging.merging import Merging
from tfcommx.planner.merging.optimal import optimal

_ROWS = (
    Merging("threshold", threshold, needs_times=False),
    Merging("single", single, needs_times=False),
    Merging("each", each, needs_times=False),
    Merging("mg_wfbp", mg_wfbp),
    Merging("omgs", omgs),
    Merging("optimal", optimal),
)
MERGINGS: dict[str, Merging] = {row.name: row for row in _ROWS}


def get(name: str) -> Merging:
    """Return the merging of a name.

    >>> get("threshold").needs_times, get("optimal").needs_times
    (False, True)

    **Raises:** PlanError for an unknown name; it names the nearest one.
    """
    return MERGINGS[check_name("merging", name, MERGINGS)]
