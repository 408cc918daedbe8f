"""Draws products of independent parameters smaller.

All cases are made; those that `make test` can do without carry the mark `exhaustive`, and
`make test-all` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest


def case(*values: Any, kept: bool) -> Any:
    """Return the parameters of a case, marked as exhaustive unless it is kept."""
    return pytest.param(*values, marks=() if kept else pytest.mark.exhaustive)


def extended(*values: Any) -> Any:
    """Return the parameters of a case that is left to `make test-extended`, which CI runs, too."""
    return pytest.param(*values, marks=pytest.mark.extended)


def drawn(rows: Sequence[Any], *groups: Sequence[Any]) -> list[Any]:
    """Return all pairs (row, member of a group); each row keeps one member of each group, in turn.

    Every row is kept with every group; every member is kept if there are at least as many rows.

    >>> [one.values for one in drawn("abc", [1, 2], [8, 9]) if not one.marks]
    [('a', 1), ('a', 8), ('b', 2), ('b', 9), ('c', 1), ('c', 8)]
    """
    return [
        case(row, member, kept=position == number % len(group))
        for number, row in enumerate(rows)
        for group in groups
        for position, member in enumerate(group)
    ]


def triples(rows: Sequence[Any], ones: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return all triples; each row keeps one of `ones` with one of `others`, both in turn.

    >>> [one.values for one in triples("abc", [1, 2], [8, 9]) if not one.marks]
    [('a', 1, 8), ('b', 2, 9), ('c', 1, 9)]
    """
    period = math.lcm(len(ones), len(others))
    return [
        case(
            row,
            one,
            other,
            kept=turn == number % len(ones)
            and position == (number + number // period) % len(others),
        )
        for number, row in enumerate(rows)
        for turn, one in enumerate(ones)
        for position, other in enumerate(others)
    ]


def squares(rows: Sequence[Any], ones: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return all triples; each row keeps every one of `ones`, each with one of `others`, in turn.

    >>> [one.values for one in squares("ab", [1, 2], [8, 9]) if not one.marks]
    [('a', 1, 8), ('a', 2, 9), ('b', 1, 9), ('b', 2, 8)]
    """
    return [
        case(row, one, other, kept=position == (number + turn) % len(others))
        for number, row in enumerate(rows)
        for turn, one in enumerate(ones)
        for position, other in enumerate(others)
    ]
