"""Which entries travel: the table of selection rules.

    all        every entry; the identity: with it, a sparse route sums as a dense one does
    exact      the k largest magnitudes
    mstopk     all above a narrow band of magnitudes, and a random run from it
    dgc        the k largest of those that a sample's threshold lets through
    threshold  those that reach a fixed threshold first
    random     any k, whatever their magnitudes

Laws: the indices are unique, ascending and in range; k of them, always; sent + kept = gradient +
residual, entry by entry; NaN and Inf are chosen before all else, and never enter a residual or a
velocity. The result depends on the inputs and the seed alone.

To add one:
    1. A file here with a class that has `select` (see `base.Selector`), and its one object, RULE.
       A rule says nothing of residuals: `error_feedback` wraps any. A rule whose kernel fuses both
       defines `select_with_residual` too (see `base.Rule`); then nothing is wrapped around it.
    2. A row of RULES below, and the function that loads the file.
    tests/kernels/test_select.py and tests/laws then hold it to the laws, on every route.

Importing this loads no TensorFlow, because plans need only the names; `rule` loads it.
"""

from __future__ import annotations

from collections.abc import Callable

from tfcommx.selection.base import Rule, Selector
from tfcommx.terms import check_name


def _all() -> Selector:
    from tfcommx.selection import all

    return all.RULE


def _dgc() -> Selector:
    from tfcommx.selection import dgc

    return dgc.RULE


def _exact() -> Selector:
    from tfcommx.selection import exact

    return exact.RULE


def _mstopk() -> Selector:
    from tfcommx.selection import mstopk

    return mstopk.RULE


def _random() -> Selector:
    from tfcommx.selection import random

    return random.RULE


def _threshold() -> Selector:
    from tfcommx.selection import threshold

    return threshold.RULE


# Name -> what loads the rule.
RULES: dict[str, Callable[[], Selector]] = {
    "all": _all,
    "dgc": _dgc,
    "exact": _exact,
    "mstopk": _mstopk,
    "random": _random,
    "threshold": _threshold,
}


def rule(name: str) -> Rule:
    """Return a rule of the table, with error feedback around it.

    **Raises:** PlanError for an unknown name; it names the nearest one.
    """
    from tfcommx.selection.error_feedback import with_error_feedback

    return with_error_feedback(RULES[check_name("selection rule", name, RULES)]())
