"""The functions by which benchmarks judge results notice wrong ones. Pure functions, no ranks."""

from __future__ import annotations

import doctest
import sys

import numpy as np
import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from bench import options, records, rounds
from bench.checks import moved_alike

START = np.float32([0.02, -0.03, 0.05])


def test_examples() -> None:
    for module in (rounds, options, records):
        tried = doctest.testmod(module)
        assert tried.failed == 0 and tried.attempted >= 2


def test_turns_change_and_hold_everyone() -> None:
    orders = [tuple(rounds.turns("abcd", number)) for number in range(-2, 20)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len({order[0] for order in orders}) == 4 and len(set(orders)) > 8


@pytest.mark.parametrize(
    ("mine", "alike"),
    [
        (START + np.float32([3e-6, 2e-6, -3e-6]), True),
        (START + np.float32([2.9e-6, 2e-6, -3e-6]), False),  # np.allclose(atol=1e-5) saw nothing
        (START, False),
        (START * np.float32(np.nan), False),
    ],
)
def test_movements_are_compared_at_their_own_size(mine: np.ndarray, alike: bool) -> None:
    reference = START + np.float32([3e-6, 2e-6, -3e-6])
    assert moved_alike([mine], [reference], [START], 1e-2) == alike


def test_what_has_not_moved_proves_nothing() -> None:
    assert not moved_alike([START], [START], [START], 1e-2)
    # Each layer by itself
    far = START + np.float32(1)
    assert not moved_alike([far, START], [far, START], [START, START], 1e-2)
    assert not moved_alike([far], [far * np.float32(np.inf)], [START], 1e-2)


def test_rows_that_nothing_judges_do_not_fail() -> None:
    def code(*verdicts: bool | None) -> int:
        rows = [options.row("a", 1, 1.0, verdict) for verdict in verdicts]
        return options.finish(rows, options.parser("", [1], 1).parse_args([]))

    assert (code(True, None), code(None, False), code()) == (0, 1, 0)
