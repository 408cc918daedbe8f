"""Work is dealt to ranks evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfcommx.planner.plan import balance


def test_longest_first() -> None:
    assert balance([5, 5, 4, 4, 3, 3], 2) == [0, 1, 0, 1, 0, 1]
    assert balance([1, 9, 2, 2, 4], 3) == [1, 0, 2, 2, 1]


@given(costs=st.lists(st.floats(0, 100), max_size=30), ranks=st.integers(1, 8))
def test_every_item_has_a_rank_and_none_has_too_much(costs: list[float], ranks: int) -> None:
    owners = balance(costs, ranks)
    assert len(owners) == len(costs) and set(owners) <= set(range(ranks))
    loads = [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    bound = max(sum(costs) / ranks, max(costs, default=0))
    assert max(loads) <= bound * (2 - 1 / ranks) + 1e-9
