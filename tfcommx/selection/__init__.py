"""Which entries travel: the table of selection rules.

    all            every entry; the identity: with it, a sparse route computes a dense route's sum
    exact          the k largest magnitudes
    mstopk         all above a narrow band of magnitudes, and a random run from it
    binary_search  mstopk with the band of its paper, found by trying 30 thresholds
    dgc            the k largest of the entries that reach a threshold estimated from a sample
    threshold      entries that reach a fixed threshold first
    random         any k, whatever their magnitudes

Laws: the indices are unique, ascending and in range; there are always k of them; sent + kept =
gradient + residual, entry by entry; NaN and Inf are chosen first, and never enter a residual or a
velocity. The result depends on the inputs and the seed alone.

To add one:
    1. A class in rules.py that has `select` (see `error_feedback.Selector`), and its one object,
       whose name is the rule's in capitals. A selector knows no residuals: `Rule` puts error
       feedback around any selector.
    2. A row of RULES below.
    tests/kernels/test_select.py and tests/laws then hold it to the laws, on every route.

Importing this package loads no TensorFlow, because plans need only the names; `rule` loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfcommx.core import check_name, is_member, load_member

if TYPE_CHECKING:
    from tfcommx.selection.error_feedback import Rule

# Name -> module:member of the selector
RULES = {
    name: f"tfcommx.selection.rules:{name.upper()}"
    for name in ("all", "dgc", "exact", "mstopk", "random", "threshold", "binary_search")
}


def rule(name: str) -> Rule:
    """Return a rule of the table, or the rule that "module:MEMBER" names.

    **Raises:** PlanError for an unknown name; it names the nearest one.
    """
    from tfcommx.selection.error_feedback import Rule

    return Rule(load_member("selection rule", name if is_member(name) else RULES[check(name)]))


def check(name: str) -> str:
    """Return the name of a rule, or "module:MEMBER", if it is known; this loads no TensorFlow.

    **Raises:** PlanError for an unknown name; it names the nearest one.
    """
    return name if is_member(name) else check_name("selection rule", name, RULES)
