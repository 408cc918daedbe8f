"""A drawn subset has every row and every member; the other cases are marked, not lost."""

from __future__ import annotations

from itertools import product

from drawing import drawn, squares, triples

ROWS, ONES, OTHERS = range(7), "abc", "xy"


def kept(cases: list) -> set[tuple]:
    return {case.values for case in cases if not case.marks}


def test_each_row_keeps_one_member_of_each_group() -> None:
    cases = drawn(ROWS, ONES, OTHERS)
    assert [case.values for case in cases] == list(product(ROWS, "abcxy"))
    for group in (ONES, OTHERS):
        pairs = [(row, member) for row, member in kept(cases) if member in group]
        assert sorted(row for row, _ in pairs) == list(ROWS)
        assert {member for _, member in pairs} == set(group)


def test_each_row_keeps_all_of_the_ones_and_all_others_are_met() -> None:
    cases = squares(ROWS, ONES, OTHERS)
    assert [case.values for case in cases] == list(product(ROWS, ONES, OTHERS))
    left = kept(cases)
    assert sorted((row, one) for row, one, _ in left) == list(product(ROWS, ONES))
    assert {(one, other) for _, one, other in left} == set(product(ONES, OTHERS))


def test_each_row_keeps_one_of_both_and_all_pairs_are_met() -> None:
    cases = triples(ROWS, ONES, OTHERS)
    assert [case.values for case in cases] == list(product(ROWS, ONES, OTHERS))
    left = kept(cases)
    assert sorted(row for row, _, _ in left) == list(ROWS)
    assert {(one, other) for _, one, other in left} == set(product(ONES, OTHERS))


def test_cases_left_out_are_marked() -> None:
    marks = {mark.name for case in drawn(ROWS, ONES) for mark in case.marks}
    assert marks == {"exhaustive"}
