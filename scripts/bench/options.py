"""The options, columns and outputs that the benchmarks share. Results are always verified.

Options (`parser`)
    -n, --sizes N ...    sizes: entries, unless the benchmark's help gives another unit
    --repeats N          timed rounds
    --smoke              the smallest run: answers are verified, times are not judged
    --json FILE          write one object a line
    --png FILE           draw one column (the seconds, unless the benchmark says otherwise) as bars
    --record NAME        keep rows and conditions as docs/records/NAME.json, for the pages

Columns (`row`), in every table and in every line of the JSON file; a benchmark adds its own after
them
    name            of the measured case
    n               its size, one of --sizes
    density         entries sent / entries; 1 if all are sent
    seconds         of one round: the median over the repeats, where these are given
    limit_seconds   the limit by the claim; null if it sets none
    times_limit     seconds / limit_seconds; null if there is no limit
    verified        true if the result was right; null where nothing is judged
    repeats, lowest_seconds, highest_seconds
                    the rounds that were timed and their spread; null where a row is no median

The standard library suffices, except for `save_picture`, which needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import records
from bench.rounds import paired_ratio
from tfcommx.core import replacing, write_text

COLUMNS = ("name", "n", "density", "seconds", "limit_seconds", "times_limit", "verified")
SPREAD = ("repeats", "lowest_seconds", "highest_seconds")
Rows = Sequence[dict[str, Any]]


class Table(NamedTuple):
    """The rows of one setting, as they are printed."""

    title: str
    rows: list[dict[str, Any]]
    # The name of a row; the seconds of each row over its seconds are a column
    base: str | None = None
    # Extra columns: heading -> function that makes a row's cell
    own: Mapping[str, Callable[[dict[str, Any]], str]] = {}
    # Printed below it
    notes: Sequence[str] = ()


def parser(
    description: str | None,
    sizes: Sequence[int],
    repeats: int,
    meaning_of_sizes: str = "entries",
    meaning_of_repeats: str = "timed rounds",
) -> argparse.ArgumentParser:
    """Make a parser of the shared options; a benchmark adds its own to it.

    Args:
        description: of the benchmark, its module's docstring.
        sizes, repeats: the defaults.
        meaning_of_sizes, meaning_of_repeats: for the help.
    """
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = {"type": int, "nargs": "+", "default": list(sizes)}
    found.add_argument("-n", "--sizes", help=f"{meaning_of_sizes}; default: %(default)s", **size)
    found.add_argument(
        "--repeats", type=int, default=repeats, help=f"{meaning_of_repeats}; default: %(default)s"
    )
    found.add_argument("--smoke", action="store_true", help="its smallest run; judges no times")
    found.add_argument("--json", type=Path, help="write one object a line to this file")
    found.add_argument("--png", type=Path, help="draw the rows as bars into this file")
    records.add_option(found)
    found.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return found


def row(
    name: str,
    n: int,
    seconds: float | Sequence[float],
    verified: bool | None,
    density: float = 1.0,
    limit_seconds: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Make a row of the shared columns, and a benchmark's own after them.

    >>> row("add", 10, 0.5, True, limit_seconds=2.0, threads=2)["times_limit"]
    0.25
    >>> one = row("add", 10, [3.0, 1.0, 2.0], True)
    >>> one["seconds"], one["repeats"], one["lowest_seconds"], one["highest_seconds"]
    (2.0, 3, 1.0, 3.0)

    Args:
        name, n, verified, density, limit_seconds: the columns.
        seconds: of each round, or one number that is no median over rounds.
        more: the benchmark's own columns.
    """
    spread: tuple[float | None, ...] = (None, None, None)
    if isinstance(seconds, Sequence):
        spread = len(seconds), min(seconds), max(seconds)
        seconds = statistics.median(seconds)
    times = None if limit_seconds is None else seconds / limit_seconds
    shared = (name, n, density, seconds, limit_seconds, times, verified)
    return dict(zip((*COLUMNS, *SPREAD), shared + spread, strict=True)) | more


def rows_of(
    n: int,
    seconds: Mapping[str, Sequence[float]],
    verified: bool | Mapping[str, bool | None],
    base: str | None = None,
    allowed: float | None = None,
    density: float = 1.0,
    **more: Any,
) -> list[dict[str, Any]]:
    """Make the rows of contestants that took turns.

    >>> rows = rows_of(8, {"plain": [1.0, 2.0], "ours": [1.1, 1.8]}, True, "plain", allowed=1.02)
    >>> [round(row["ratio"], 2) for row in rows], round(rows[1]["limit_seconds"], 2)
    ([1.0, 1.0], 1.53)

    Args:
        n, verified, density: the columns; `verified` of all, or of each.
        seconds: name -> of each round.
        base: a contestant; `ratio` is the median over the rounds of the time over its time in the
            same round.
        allowed: times the base's median is the limit.
        more: the benchmark's own columns, the same in all rows.
    """
    limit = None if base is None or allowed is None else allowed * statistics.median(seconds[base])
    rows = []
    for name, times in seconds.items():
        good = verified if isinstance(verified, bool) else verified[name]
        own = dict(more)
        if base is not None and len(times) == len(seconds[base]):
            own["ratio"] = paired_ratio(times, seconds[base])
        rows.append(row(name, n, times, good, density, limit, **own))
    return rows


def right(rows: Rows) -> bool:
    """Return True if no row is wrong; some are not judged."""
    return all(one["verified"] in (True, None) for one in rows)


def write(rows: Rows, file: Path) -> None:
    """Write one object a line."""
    write_text(file, "".join(json.dumps(one) + "\n" for one in rows))


def finish(
    rows: Rows,
    chosen: argparse.Namespace,
    draw: Callable[[Rows, Path], None] | None = None,
    note: str | None = None,
) -> int:
    """Write the files that were asked for; return the exit code, 1 if anything was not right.

    Args:
        rows: of all settings.
        chosen: `json`, `png` and `record`.
        draw: makes the picture.
        note: for the record, where the ranks were. Figures that are wrong are not recorded.
    """
    if chosen.json:
        write(rows, chosen.json)
    if chosen.png and rows:
        (draw or save_picture)(rows, chosen.png)
    if chosen.record and rows and right(rows):
        command = records.command_of(sys.argv[1:])
        print(f"recorded: {records.write(chosen.record, rows, command, note)}")
    elif chosen.record:
        print(f"not recorded as {chosen.record!r}: a row is not verified, or there is none")
    return 0 if right(rows) else 1


def print_table(table: Table) -> None:
    """Print the shared columns of some rows, then the benchmark's own."""
    more = dict(table.own)
    if all(one.get("ratio") is not None for one in table.rows):
        more = {"ratio": lambda one: f"{one['ratio']:.3f}"} | more
    if table.base is not None:
        base = next(one["seconds"] for one in table.rows if one["name"] == table.base)
        more = {f"/ {table.base}": lambda one: f"{one['seconds'] / base:.2f}"} | more
    heads = ["name", "n", "density", "ms", "limit, ms", "/ limit", "verified", *more]
    lines = [heads]
    for one in table.rows:
        lines.append([*shared_cells(one), *(make(one) for make in more.values())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{table.title}")
    for name, *cells in lines:
        others = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join([name.ljust(widths[0]), *others]))
    print(*table.notes, sep="\n", end="\n" if table.notes else "", flush=True)


def shared_cells(one: dict[str, Any]) -> list[str]:
    """Return a row's cells of the shared columns."""
    limit = one["limit_seconds"]
    return [
        one["name"],
        f"{one['n']:,}",
        f"{one['density']:g}",
        f"{one['seconds'] * 1e3:.2f}",
        "" if limit is None else f"{limit * 1e3:.2f}",
        "" if limit is None else f"{one['times_limit']:.2f}",
        {True: "yes", None: ""}.get(one["verified"], "NO"),
    ]


def save_picture(rows: Sequence[dict[str, Any]], path: Path, drawn: str = "seconds") -> None:
    """Draw a column as bars, one panel for each size and density; seconds with their limits."""
    from matplotlib.figure import Figure

    panels = sorted({(one["n"], one["density"]) for one in rows})
    heights = [sum((one["n"], one["density"]) == panel for one in rows) for panel in panels]
    size = (8, 0.6 + sum(1.2 + 0.25 * height for height in heights))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[3 + h for h in heights])
    for axes, (n, density) in zip(grid[:, 0], panels, strict=True):
        group = [one for one in rows if (one["n"], one["density"]) == (n, density)]
        # By position: rows of several settings may have the same name.
        axes.barh(range(len(group)), [one[drawn] for one in group])
        axes.set_yticks(range(len(group)), [one["name"] for one in group])
        axes.invert_yaxis()
        limits = [(one["limit_seconds"], position) for position, one in enumerate(group)]
        limits = [limit for limit in limits if limit[0] is not None]
        if limits and drawn == "seconds":
            axes.plot(*zip(*limits, strict=True), "k|", markersize=14, label="limit")
            axes.legend()
        axes.set_xscale("log")
        axes.set_xlabel(drawn.replace("_", " "))
        axes.set_title(f"n = {n:,}, density {density:g}", loc="left")
    with replacing(path) as part:
        figure.savefig(part, dpi=150)
