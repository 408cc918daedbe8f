"""Rows of a comparison of two methods, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tfcommx.comparison.rows import (
    Comparison,
    Steps,
    choices,
    method_rows,
    pareto_words,
    rows_of,
    score_of,
    time_rows,
)


def training(scores: list[float], sent: int, key: str = "test_accuracy") -> dict[str, Any]:
    """Return a training whose epochs have 10 steps and send as many bytes each."""
    epochs = [
        {"epoch": number, "steps": 10, "bytes_between_nodes": number * sent, key: score}
        for number, score in enumerate(scores, 1)
    ]
    return {"epochs": epochs}


DENSE = [training([0.5, 0.8, 0.90], 1000), training([0.6, 0.7, 0.92], 1000)]
SHORT = [training([0.4, 0.7, 0.90], 30), training([0.4, 0.6, 0.91], 30)]
# Steps of 1 s and of .25 s
STEPS = Steps(200e6, {"dense": [1.0] * 3, "short": [0.25] * 3})
FOUND = Comparison({"dense": DENSE, "short": SHORT}, [STEPS], score_of(DENSE[0]))


def test_equal_steps_and_bytes() -> None:
    row = method_rows(FOUND)["short"]
    assert row["mean"] == pytest.approx(90.5) and row["spread"] == pytest.approx(0.7071, abs=1e-4)
    assert row["loss"] == pytest.approx(0.5) and row["bytes_share"] == pytest.approx(0.03)
    # 1 % of 3000 bytes is one epoch of 30, 3 % is all three
    assert row["within_1_percent_of_bytes"] == pytest.approx(40)
    assert row["within_3_percent_of_bytes"] == pytest.approx(90.5)
    assert method_rows(FOUND)["dense"]["within_10_percent_of_bytes"] is None


def test_the_target_is_the_reference_less_what_its_score_allows() -> None:
    """91 - .2: one seed of the short method reaches it, and so it has no mean."""
    assert FOUND.wanted() == pytest.approx(90.8)
    row = method_rows(FOUND)["short"]
    assert row["bytes_to_target"] is None and (row["seeds_at_target"], row["seeds"]) == (1, 2)
    given = FOUND._replace(target=70.0)
    assert method_rows(given)["short"]["bytes_to_target"] == pytest.approx((60 + 90) / 2)
    assert time_rows(given, STEPS)["short"]["seconds_to_target"] == pytest.approx((5 + 7.5) / 2)


def test_equal_time() -> None:
    rows = time_rows(FOUND, STEPS)
    assert rows["dense"]["seconds"] == 30 and rows["short"]["times_faster"] == 4
    # Dense takes 30 s: in 7.5 s it has ended no epoch, the other method all three
    assert rows["dense"]["within_25_percent_of_time"] is None
    assert rows["short"]["within_25_percent_of_time"] == pytest.approx(90.5)
    assert rows["dense"]["within_50_percent_of_time"] == pytest.approx(55)
    assert rows["short"]["best_in_time"] and rows["dense"]["best_in_time"]


def test_a_slow_network_and_a_fast_one_choose_differently() -> None:
    fast = Steps(10e9, {"dense": [0.1] * 3, "short": [0.25] * 3})
    found = FOUND._replace(steps=[STEPS, fast])
    assert choices(found, [0.2, 1.0]) == [
        (200e6, [("dense", 1.0), ("short", 4.0)]),
        (10e9, [("dense", 1.0), ("dense", 1.0)]),
    ]
    assert not time_rows(found, fast)["short"]["best_in_time"]
    words = pareto_words(found.points(fast.seconds), lambda cost: f"{cost:g} s", "time")
    assert words == "In time nothing beats dense (91.00 after 3 s). Beaten: short, by dense."


def test_rows_are_json_and_name_method_and_bandwidth() -> None:
    rows = json.loads(json.dumps(rows_of(FOUND)))
    assert [(row["name"], row["bandwidth_mbit"]) for row in rows] == [
        ("dense", 200.0),
        ("short", 200.0),
    ]
    assert not any(row["measured"] for row in rows)
    # Without a bandwidth, the rows that need none remain
    assert [row["name"] for row in rows_of(FOUND._replace(steps=[]))] == ["dense", "short"]


def test_bleu_counts_where_a_task_has_it() -> None:
    one = training([20.0, 36.6], 10, "test_bleu")
    assert score_of(one).text == "BLEU"
    found = Comparison({"other": [one]}, [], score_of(one))
    # Without `dense` the first method is the one that others are compared with
    assert found.reference == "other" and found.wanted() == pytest.approx(36.1)
