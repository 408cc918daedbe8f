"""The columns of the protocol, the errors and the tables that all reproductions share.

Each source has a YAML file with its structure, its assumed constants and its rows, and a script
that predicts them. Columns of a row, in every table and in every line of --json:
    source, name        which published number
    role                calibrated (sets a constant), scored, or not scored
    published_s         seconds of a step, from the published number; a speed-up where the script
                        says so
    nominal_s           predicted with the assumed constants alone
    calibrated_s        predicted with the constants that the calibration rows set
    compute_s           of a step without exchange; null for a speed-up
    error               calibrated_s / published_s - 1
    message_error       the same of the part that the exchange adds to a step
    reason              why it is not scored
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfcommx.core import write_text
from tfcommx.recipes.reader import parse

HERE = Path(__file__).resolve().parent
SCORED, CALIBRATED, NOT_SCORED = "scored", "calibrated", "not scored"


def read(name: str) -> dict[str, Any]:
    """Read the YAML file of a source."""
    return parse((HERE / f"{name}.yaml").read_text(encoding="utf-8"))


def row(
    source: str,
    name: str,
    published_s: float,
    nominal_s: float | None,
    calibrated_s: float | None,
    compute_s: float | None = None,
    role: str = SCORED,
    reason: str = "",
) -> dict[str, Any]:
    """Make a row; `compute_s` is a step without exchange, of the published and the predicted."""
    error = None if calibrated_s is None else calibrated_s / published_s - 1
    messages = None
    if compute_s is not None and calibrated_s is not None and published_s > compute_s:
        messages = (calibrated_s - compute_s) / (published_s - compute_s) - 1
    return {
        "source": source,
        "name": name,
        "role": role,
        "published_s": published_s,
        "nominal_s": nominal_s,
        "calibrated_s": calibrated_s,
        "compute_s": compute_s,
        "error": error,
        "message_error": messages,
        "reason": reason,
    }


def solve(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return the argument, between two bounds, at which a monotonic function has a value.

    If the function does not reach the value between the bounds, the nearer bound is returned.
    """
    rises = function(high) > function(low)
    for _ in range(60):
        middle = (low + high) / 2
        if (function(middle) < wanted) == rises:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def errors(rows: Iterable[Mapping[str, Any]], column: str = "error") -> tuple[float, float, int]:
    """Return the median and the largest error of the scored rows, and their number."""
    found = [abs(one[column]) for one in rows if one["role"] == SCORED and one[column] is not None]
    return (statistics.median(found), max(found), len(found)) if found else (0.0, 0.0, 0)


def verdict(what: str, rows: Sequence[Mapping[str, Any]], goal: Mapping[str, float]) -> str:
    """Say how large the errors are, and whether the goal is reached."""
    median, largest, count = errors(rows)
    messages = errors(rows, "message_error")
    reached = count > 0 and median <= goal.get("median", 1.0) and largest <= goal["largest"]
    wanted = ", ".join(f"{name} {value:.0%}" for name, value in goal.items())
    of_messages = f"; of the exchange: median {messages[0]:.0%}, largest {messages[1]:.0%}"
    return (
        f"{what}: {count} scored; error of the step: median {median:.1%}, largest {largest:.1%}"
        f"{of_messages if messages[2] else ''}; goal ({wanted}) "
        f"{'reached' if reached else 'MISSED'}"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the rows as a Markdown table."""
    heads = ("name", "role", "published_s", "nominal_s", "calibrated_s", "error", "message_error")
    lines = ["| " + " | ".join(head.replace("_", " ") for head in heads) + " |"]
    lines.append("|---" * len(heads) + "|")
    for one in rows:
        cells = [one["name"], one["role"]]
        cells += ["" if one[key] is None else f"{one[key]:.4g}" for key in heads[2:5]]
        cells += ["" if one[key] is None else f"{one[key]:+.1%}" for key in heads[5:]]
        lines.append("| " + " | ".join(cells) + " |")
    notes = {one["reason"] for one in rows if one["reason"]}
    return "\n".join([*lines, *(f"- not scored: {note}" for note in sorted(notes))])


def main(
    description: str | None, run: Callable[[], tuple[list[dict[str, Any]], list[str]]]
) -> None:
    """Run a reproduction: print its table and verdicts, write its rows."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--json", type=Path, help="write one object a line to this file")
    chosen = options.parse_args()
    rows, verdicts = run()
    print(table(rows))
    print("\n" + "\n".join(verdicts))
    if chosen.json:
        write_text(chosen.json, "".join(json.dumps(one) + "\n" for one in rows))
