"""The functions by which benchmarks judge results notice wrong ones. Pure functions, no ranks."""

from __future__ import annotations

import doctest
import os
import sys

import numpy as np
import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from bench import command, options, ranks, records, results, rounds
from bench.checks import moved_alike, selected_right

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


def test_an_exact_selection_has_the_largest_entries() -> None:
    """One in which the least of 200 was another passed for exact."""
    total = np.arange(1, 1001, dtype=np.float32)
    for chosen, share, right in ((801, 1.0, True), (800, 1.0, False), (800, 0.99, True)):
        indices = np.array([chosen - 1, *range(801, 1000)])
        kept = total.copy()
        kept[indices] = 0
        assert selected_right(indices, total[indices], kept, total, 200, share) == right


@pytest.mark.parametrize(("status", "ends"), [(0, 0), (1, 1), (-9, 1)])
def test_all_fail_if_one_is_killed(status: int, ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest status was taken, and that of a killed process is negative."""
    monkeypatch.setattr(command.subprocess, "call", lambda words: status * (words[-1] == "step"))
    assert command.main(["all", "--only", "select", "step"]) == ends


@pytest.mark.parametrize("name", ["Some", "some-1", "../some"])
def test_a_records_name_is_refused_before_anything_is_measured(name: str) -> None:
    """It was refused after the measurement, which was lost."""
    for parser in (options.parser("", [1], 1), ranks.parser()):
        with pytest.raises(SystemExit, match=repr(name)):
            parser.parse_args(["--record", name])
        assert parser.parse_args(["--record", "some_1"]).record == "some_1"


def test_idle_seconds_are_those_of_the_cores_that_a_process_may_use() -> None:
    """The idle ones of a machine of 64 cores hid that the process's two were busy."""
    lines = ["cpu  0 0 0 990 0 0 0 0 0 0", *(f"cpu{core} 1 2 3 {core}00 50 0" for core in range(9))]
    text = "\n".join([*lines, "intr 7 0", "ctxt 9", ""])
    tick = os.sysconf("SC_CLK_TCK")
    assert results.idle_seconds(text, {1, 3}) * tick == 100 + 300 + 2 * 50
    assert results.idle_seconds(text, {7}) * tick == 750


def test_rows_that_nothing_judges_do_not_fail() -> None:
    def code(*verdicts: bool | None) -> int:
        rows = [options.row("a", 1, 1.0, verdict) for verdict in verdicts]
        return options.finish(rows, options.parser("", [1], 1).parse_args([]))

    assert (code(True, None), code(None, False), code()) == (0, 1, 0)
