"""What the gradients of a wrapped optimizer travel by, and whether that is decided."""

from __future__ import annotations

from typing import Any

from tfcommx.runtime.trial import TrialExecutor
from tfcommx.terms import PLAIN, Plan


def executors(optimizer: Any) -> list[Any]:
    """Return what carries out the plans of an optimizer: nothing, if it is not wrapped."""
    exchanger = getattr(optimizer, "exchanger", None)
    return [] if exchanger is None else [run.executor for run in exchanger.runs.values()]


def is_decided(optimizer: Any) -> bool:
    """Tell whether no trial is under way: steps of several plans would be timed as one's."""
    trials = [one for one in executors(optimizer) if isinstance(one, TrialExecutor)]
    return all(one.chosen is not None for one in trials)


def selects(plan: Plan) -> bool:
    """Tell whether any bucket sends a selection of its entries."""
    return any(bucket.k is not None for bucket in plan.buckets)


def in_words(plan: Plan) -> str:
    """Return how the buckets of a plan travel, and how many there are."""
    kinds = dict.fromkeys(
        bucket.route + ("" if bucket.wire == PLAIN else f" {bucket.wire}")
        for bucket in plan.buckets
    )
    return f"{' + '.join(kinds)}, {len(plan.buckets)} bucket{'s' * (len(plan.buckets) > 1)}"
