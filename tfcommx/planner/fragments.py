"""Fragments: groups of variables with about equally many entries, each exchanged at its own step.

variables  --fragment_of-->  F groups  --make_plan, each-->  one plan, no bucket of two groups
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfcommx.planner.streams import Gradient
from tfcommx.runtime.balance import balance
from tfcommx.terms import Bucket, Plan, PlanError
from tfcommx.terms.piece import Piece


def fragment_of(entries: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the fragment of each variable: the longest first, each to that with least so far.

    >>> fragment_of({"a": 6, "b": 4, "c": 3}, 2)
    {'a': 0, 'b': 1, 'c': 1}

    Args:
        entries: variable path -> its entries, >= 1, in any order.
        count: of fragments, >= 1.

    **Raises:** PlanError for fewer variables than fragments.
    """
    if len(entries) < count:
        raise PlanError(
            f"Each fragment needs a variable. Received fragments={count} and {len(entries)} "
            "variables. Take fewer."
        )
    paths = sorted(entries)
    return dict(zip(paths, balance([entries[path] for path in paths], count), strict=True))


def plan_in_fragments(
    gradients: Sequence[Gradient], count: int, make: Callable[[Sequence[Gradient]], Plan]
) -> Plan:
    """Make a plan of which no bucket has variables of two fragments.

    Args:
        gradients: in forward order.
        count: of fragments, >= 1.
        make: makes the plan of some of the gradients.

    **Raises:** PlanError for fewer variables than fragments, and as `make` does.
    """
    if count == 1:
        return make(gradients)
    place = fragment_of({one.path: one.entries for one in gradients}, count)
    parts = [make([one for one in gradients if place[one.path] == part]) for part in range(count)]
    buckets = [bucket for part in parts for bucket in part.buckets]
    named = tuple(
        dataclasses.replace(bucket, name=f"tfcommx/bucket{number}")
        for number, bucket in enumerate(buckets)
    )
    return dataclasses.replace(parts[0], buckets=named)


def fragments_of_buckets(plan: Plan, count: int) -> list[Plan]:
    """Return the plan's buckets of each fragment.

    **Raises:** PlanError for a bucket of two fragments, in a plan that was made without them.
    """
    entries: dict[str, int] = {}
    for bucket in plan.buckets:
        for name, size in zip(bucket.variables, bucket.sizes, strict=True):
            path = Piece.of(name).path
            entries[path] = entries.get(path, 0) + size
    place = fragment_of(entries, count)
    parts: list[list[Bucket]] = [[] for _ in range(count)]
    for bucket in plan.buckets:
        found = {place[Piece.of(name).path] for name in bucket.variables}
        if len(found) > 1:
            raise PlanError(
                f"Fragments need buckets of their own. Received fragments={count} and a plan whose "
                f"{bucket.name} has variables of {len(found)} of them. Leave `plan` out, or take "
                "fragments=1."
            )
        parts[found.pop()].append(bucket)
    return [dataclasses.replace(plan, buckets=tuple(part)) for part in parts]
