"""The report of runs as tables on the terminal."""

import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfcommx.core import reading
from tfcommx.report.summary import (
    FILE,
    PARTS,
    REMEDY,
    ReportError,
    bytes_text,
    epoch_cells,
    more_scores,
    phase_cells,
    phase_rows,
    plural,
    read,
    seconds_by_part,
    snapshots_text,
    target_text,
    time_text,
)

# Columns if the output is a pipe or a file, which have no width: enough for the widest table, that
# of a simulated step on a network that varies
WIDE = 200
# Columns of a report with texts
LEFT = ("exchange",)


def terminal_console() -> Console:
    """Return a console for tables: as wide as the terminal, or WIDE without one."""
    width = None if sys.stdout.isatty() else WIDE
    # Names of the user may have brackets and colons: rich would take `[spot]` for a style, and
    # raise for `[/data]`
    return Console(highlight=False, markup=False, emoji=False, width=width)


def show_rows(
    rows: Sequence[Mapping[str, object]],
    left: Collection[str] = (),
    bold: Callable[[int], bool] = lambda _: False,
    title: str | None = None,
) -> None:
    """Print rows as a table whose words are unbroken.

    On a terminal that is too narrow for it, a single row becomes a line for each column, and
    several rows run over the edge.

    Args:
        rows: name of the column -> cell; all have the same columns.
        left: columns that are aligned left, as texts; the others are aligned right.
        bold: position of a row -> True if it is printed in bold.
        title: heading of the table; None: no heading.
    """
    console = terminal_console()
    table = table_of(title, rows[0], left)
    table.box = None
    for position, row in enumerate(rows):
        table.add_row(*map(str, row.values()), style="bold" if bold(position) else None)
    # Because rich shrinks all columns alike, and would break `allreduce` and `0.05709`
    for column in table.columns:
        words = " ".join([str(column.header), *map(str, column.cells)]).split()
        column.min_width = max(map(len, words), default=0)
    least = sum(column.min_width or 0 for column in table.columns)
    gaps = len(table.columns)
    if least + 2 * gaps > console.width:
        table.padding = (0, 1, 0, 0)
        if least + gaps > console.width and len(rows) == 1:
            table = Table.grid(padding=(0, 2))
            for name, cell in rows[0].items():
                table.add_row(name, str(cell))
        console.width = max(console.width, least + gaps)
    console.print(table, crop=False)


def table_of(
    title: str | None,
    headings: Iterable[str],
    left: Collection[str] = (),
    rows: Iterable[Iterable[str]] = (),
) -> Table:
    """Return a table of rows of cells; columns other than those in `left` are aligned right."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        # Folded if the terminal is narrow, because rich would cut numbers: `4.952e+…`
        justify: Literal["left", "right"] = "left" if heading in left else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table


def show_run(folder: Path) -> None:
    """Print the report of a run, its folder, and the command that draws its curves.

    **Raises:** ReportError if the folder holds no summary that can be shown.
    """
    show(read_to_show(folder))
    print(f"all files: {folder}")
    print(f"curves: tensorboard --logdir {shlex.quote(str(folder))}")


def read_to_show(folder: Path) -> dict[str, Any]:
    """Read a run's summary. **Raises:** ReportError if it is none, or no table can show it."""
    with reading("The summary of a run", folder / FILE, REMEDY, ReportError):
        summary = read(folder)
        _tables(summary)  # So that a damaged row is an error that names the file
    return summary


def show(summary: dict[str, Any], console: Console | None = None) -> None:
    console = console or terminal_console()
    for table in _tables(summary):
        if table.row_count:
            console.print(table)


def _tables(summary: dict[str, Any]) -> list[Table]:
    rate, epochs = f"{summary['counted']}/s", map(epoch_cells, summary["rows"])
    of_epoch = ("epoch", "size", "exchange", "loss", "train", "test", rate, "seconds")
    of_phase = ("epochs", "size", "batch", "exchange", rate, "one process", "scaling")
    phases = map(phase_cells, phase_rows(summary))
    return [
        table_of(f"{summary.get('name', 'run')}: epochs", of_epoch, LEFT, epochs),
        table_of("phases, without the first step of each", of_phase, LEFT, phases),
        _totals(summary),
        _breakdown(summary),
    ]


def show_comparison(runs: Mapping[str, dict[str, Any]]) -> None:
    """Print the totals and the time breakdown of several runs, one column for each run."""
    table = table_of("runs", ["", *runs], left=[""])
    for heading, text in (
        ("test accuracy", lambda run: f"{run['test_accuracy']:.4f}"),
        ("epochs", lambda run: f"{len(run['rows'])} of {run['epochs']}"),
        ("time", lambda run: time_text(run["seconds"])),
        ("in steps", lambda run: f"{run['throughput']:.0f} {run['counted']}/s"),
        ("sent between nodes, per rank", lambda run: bytes_text(run["bytes_between_nodes"])),
    ):
        table.add_row(heading, *map(text, runs.values()))
    for part, meaning in PARTS.items():
        part_seconds = [seconds_by_part(run["rows"])[part] for run in runs.values()]
        if any(part_seconds):
            table.add_row(meaning, *(f"{seconds:.1f} s" for seconds in part_seconds))
    terminal_console().print(table)


def _totals(summary: dict[str, Any]) -> Table:
    dense, sent = summary["bytes_between_nodes_dense"], summary["bytes_between_nodes"]
    # A dense exchange sends more than its gradients, because metrics are sent, too
    saved = ""
    if dense > sent > 0:
        saved = f", {dense / sent:.1f} times less than the {bytes_text(dense)} of dense gradients"
    rate = f"{summary['throughput']:.0f} {summary['counted']}/s in training steps"
    replicas: str | Text = "identical at the end of every epoch"
    if not summary["replicas_identical"]:
        replicas = Text("NOT IDENTICAL: the result is not sound", style="bold red")
    table = Table(show_header=False)
    for name, text in (
        ("test accuracy", f"{summary['test_accuracy']:.4f}"),
        *((f"test {name}", f"{value:.4f}") for name, value in more_scores(summary).items()),
        *([("target", target_text(summary["target"]))] if "target" in summary else []),
        ("processes", f"{summary['ranks']} on {plural(summary['nodes'], 'node')}"),
        ("time", f"{summary['seconds']:.0f} s, {rate}"),
        ("sent between nodes", f"{bytes_text(sent)} per rank{saved}"),
        *([("snapshots", snapshots_text(summary["snapshots"]))] if "snapshots" in summary else []),
        *_loader(summary["rows"]),
        ("replicas", replicas),
    ):
        table.add_row(name, text)
    return table


def _breakdown(summary: dict[str, Any]) -> Table:
    table = Table(title="where rank 0's time went", title_justify="left", show_header=False)
    seconds = seconds_by_part(summary["rows"])
    total = sum(seconds.values()) or 1
    for part, meaning in PARTS.items():
        if spent := seconds[part]:
            table.add_row(meaning, f"{spent:.1f} s", f"{100 * spent / total:.0f} %")
    return table


def _loader(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    # A user's data set may report other statistics, or none
    seen = [row["loader"] for row in rows if "hit_memory" in row.get("loader", {})]
    if not seen:
        return []
    samples = sum(part["samples"] for part in seen) or 1
    # Weighted, because epochs of a resumed run may have fewer samples
    shares = {
        level: sum(part[f"hit_{level}"] * part["samples"] for part in seen) / samples
        for level in ("memory", "disk", "source")
    }
    waited = sum(part["loader_wait_seconds"] for part in seen)
    parts = [f"{level} {100 * share:.1f} %" for level, share in shares.items()]
    for name in ("unreadable", "repaired", "overflow"):  # Shown only if there are any
        if count := int(sum(part[name] for part in seen)):
            parts.append(f"{count} {name}")
    return [("images came from", ", ".join(parts)), ("waited for images", f"{waited:.2f} s")]
