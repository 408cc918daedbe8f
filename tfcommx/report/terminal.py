"""The report of a run, printed to the terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tfcommx.report.summary import PARTS, scheme_text


def show(summary: dict[str, Any], console: Console | None = None) -> None:
    """Print the report to the terminal."""
    if console is None:
        # horovodrun's pipes have no width, and 80 columns would break the table
        wide = None if sys.stdout.isatty() else 120
        console = Console(highlight=False, width=wide)
    epochs = Table(title=f"{summary.get('name', 'run')}: epochs", title_justify="left")
    for heading in ("epoch", "pixels", "exchange", "loss", "train", "test", "images/s", "seconds"):
        epochs.add_column(heading, justify="left" if heading == "exchange" else "right")
    for row in summary["rows"]:
        epochs.add_row(
            str(row["epoch"]),
            str(row["resolution"]),
            scheme_text(row),
            f"{row['loss']:.3f}",
            f"{row['train_accuracy']:.4f}",
            f"{row['test_accuracy']:.4f}",
            f"{row['images_per_second']:.0f}",
            f"{sum(row['seconds'].values()):.1f}",
        )
    console.print(epochs)

    total = Table(show_header=False)
    dense, sent = summary["bytes_between_nodes_dense"], summary["bytes_between_nodes"]
    saved = (
        f", {dense / sent:.1f} times less than the {_bytes(dense)} of dense gradients"
        if dense > sent > 0
        else ""
    )
    identical = summary["replicas_identical"]
    for name, text in (
        ("test accuracy", f"{summary['test_accuracy']:.4f}"),
        ("processes", f"{summary['ranks']} on {summary['nodes']} nodes"),
        (
            "time",
            f"{summary['seconds']:.0f} s, {summary['images_per_second']:.0f} images/s in "
            "training steps",
        ),
        ("sent between nodes", f"{_bytes(sent)} per rank{saved}"),
        *_loader(summary["rows"]),
        (
            "replicas",
            "identical at the end of every epoch"
            if identical
            else "[bold red]NOT IDENTICAL: the result is not sound[/]",
        ),
    ):
        total.add_row(name, text)
    console.print(total)

    breakdown = Table(title="where rank 0's time went", title_justify="left", show_header=False)
    seconds = {part: sum(row["seconds"][part] for row in summary["rows"]) for part in PARTS}
    for part, meaning in PARTS.items():
        breakdown.add_row(
            meaning,
            f"{seconds[part]:.1f} s",
            f"{100 * seconds[part] / (sum(seconds.values()) or 1):.0f} %",
        )
    console.print(breakdown)


def _loader(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Say how the cache served rank 0; nothing of a summary that was written before there was a
    cache.
    """
    seen = [row["loader"] for row in rows if "loader" in row]
    if not seen:
        return []
    samples = sum(part["samples"] for part in seen) or 1
    shares = {
        level: sum(part[f"hit_{level}"] * part["samples"] for part in seen) / samples
        for level in ("memory", "disk", "source")
    }
    waited = sum(part["loader_wait_seconds"] for part in seen)
    strange = {
        name: int(sum(part[name] for part in seen))
        for name in ("unreadable", "repaired", "overflow")
    }
    return [
        (
            "images came from",
            ", ".join(
                [
                    *(f"{level} {100 * share:.1f} %" for level, share in shares.items()),
                    *(f"{count} {name}" for name, count in strange.items() if count),
                ]
            ),
        ),
        ("waited for images", f"{waited:.2f} s"),
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1000
    raise AssertionError
