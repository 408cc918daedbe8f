"""The options, columns and outputs that the benchmarks share. Every result is verified, always.

Options (`parser`)
    -n, --sizes N ...    entries of what is measured
    --repeats N          timed rounds
    --json FILE          write one object a line
    --png FILE           draw the seconds of each name as bars

Columns (`row`), in every line of the JSON file; a benchmark adds its own after them
    name            what was measured
    n               its entries
    density         entries that travel / entries; 1 if all do
    seconds         of one round
    limit_seconds   what the claim allows; null if it says nothing
    times_limit     seconds / limit_seconds; null if there is no limit
    verified        whether the result was right

The standard library suffices for options and JSON; `print_table` needs rich, `save_picture`
matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("name", "n", "density", "seconds", "limit_seconds", "times_limit", "verified")


def parser(description: str | None, sizes: Sequence[int], repeats: int) -> argparse.ArgumentParser:
    """Make a parser of the shared options; a benchmark adds its own to it.

    Args:
        description: of the benchmark, its module's docstring.
        sizes, repeats: the defaults.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "-n",
        "--sizes",
        type=int,
        nargs="+",
        default=list(sizes),
        help="entries; default: %(default)s",
    )
    options.add_argument(
        "--repeats", type=int, default=repeats, help="timed rounds; default: %(default)s"
    )
    options.add_argument("--json", type=Path, help="write one object a line to this file")
    options.add_argument("--png", type=Path, help="draw the seconds of each name into this file")
    return options


def row(
    name: str,
    n: int,
    seconds: float,
    verified: bool,
    density: float = 1.0,
    limit_seconds: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Make a row of the shared columns, and a benchmark's own after them.

    >>> row("add", 10, 0.5, True, limit_seconds=2.0, threads=2)["times_limit"]
    0.25
    """
    times = None if limit_seconds is None else seconds / limit_seconds
    shared = (name, n, density, seconds, limit_seconds, times, verified)
    return dict(zip(COLUMNS, shared, strict=True)) | more


def finish(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> int:
    """Write the files that were asked for; return the exit code, 1 if anything is not verified."""
    if chosen.json:
        chosen.json.write_text("".join(json.dumps(one) + "\n" for one in rows))
    if chosen.png:
        save_picture(rows, chosen.png)
    return 0 if all(one["verified"] for one in rows) else 1


def print_table(rows: Sequence[dict[str, Any]], title: str, base: str) -> None:
    """Print rows of one setting, with their seconds over those of the row named `base`."""
    from rich.console import Console
    from rich.table import Table

    base_seconds = next(one["seconds"] for one in rows if one["name"] == base)
    table = Table(title=title, title_justify="left")
    for heading in ("name", "ms", f"/ {base}", "/ limit", "verified"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for one in rows:
        table.add_row(
            one["name"],
            f"{one['seconds'] * 1e3:.2f}",
            f"{one['seconds'] / base_seconds:.2f}",
            "" if one["times_limit"] is None else f"{one['times_limit']:.2f}",
            "yes" if one["verified"] else "NO",
        )
    Console().print(table)


def save_picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the seconds of each name as bars, one panel for each size and density."""
    from matplotlib.figure import Figure

    panels = sorted({(one["n"], one["density"]) for one in rows})
    figure = Figure(figsize=(8, 0.6 + 2.4 * len(panels)), layout="constrained")
    for number, (n, density) in enumerate(panels, 1):
        group = [one for one in rows if (one["n"], one["density"]) == (n, density)]
        axes = figure.add_subplot(len(panels), 1, number)
        axes.barh([one["name"] for one in group][::-1], [one["seconds"] for one in group][::-1])
        limits = [one["limit_seconds"] for one in group if one["limit_seconds"] is not None]
        if limits:
            axes.axvline(max(limits), color="black", linestyle=":", label="limit")
            axes.legend()
        axes.set_xscale("log")
        axes.set_xlabel("seconds")
        axes.set_title(f"n = {n:,}, density {density:g}", loc="left")
    figure.savefig(path, dpi=150)
