"""What a run says: progress while it goes, then a terminal report, figures, TensorBoard events and
summary.json.

No TensorFlow is imported until events are written, so `tfcommx report` is quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

# The parts of an epoch, as tfcommx.train.Timing measures them, in the order of the stacked bars.
PARTS = {
    "data": "waiting for data",
    "step": "steps: forward, backward, exchange, update",
    "first_step": "first step of a phase: tracing",
    "evaluation": "evaluation",
    "other": "averaging, comparing, reporting",
}
REQUIRED = (
    "test_accuracy",
    "ranks",
    "nodes",
    "epochs",
    "seconds",
    "images_per_second",
    "bytes_between_nodes",
    "bytes_between_nodes_dense",
    "replicas_identical",
    "rows",
)


class ReportError(ValueError):
    """A run folder without a summary that can be shown."""


class Progress:
    """One bar over all steps of a run on a terminal; elsewhere one plain line per epoch. Silent
    unless `shown`.

    Under horovodrun the output is a pipe; the bar then goes to the device file `terminal`, where
    that is one.
    """

    def __init__(
        self,
        steps: int,
        epochs: int,
        shown: bool = True,
        stream: IO[str] | None = None,
        terminal: str | None = None,
    ) -> None:
        if shown and stream is None and terminal and not sys.stdout.isatty():
            with contextlib.suppress(OSError):  # no such device, or not ours: plain lines then
                device = os.open(terminal, os.O_WRONLY | os.O_NOCTTY)
                stream = os.fdopen(device, "w") if os.isatty(device) else None
        self.steps, self.epochs, self.shown, self.done = steps, epochs, shown, 0
        self.console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self.started = time.monotonic()
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        self.started = time.monotonic()
        if self.shown and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(f"epoch 1/{self.epochs}", total=self.steps)
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()

    def step(self) -> None:
        """Count one step."""
        self.done += 1
        if self.bar:
            self.bar.advance(self.task)

    def epoch(self, row: dict[str, Any]) -> None:
        """Show the row of an epoch that has ended."""
        if not self.shown:
            return
        gone = time.monotonic() - self.started
        left = gone / self.done * (self.steps - self.done) if self.done else 0.0
        line = (
            f"epoch {row['epoch']:2}/{self.epochs}  {row['resolution']:3} px  {_scheme(row):24}  "
            f"loss {row['loss']:.3f}  "
            f"train {row['train_accuracy']:.4f}  test {row['test_accuracy']:.4f}  "
            f"{row['images_per_second']:7.0f} images/s"
        )
        if self.bar:
            self.bar.console.print(line)
            self.bar.update(
                self.task, description=f"epoch {min(row['epoch'] + 1, self.epochs)}/{self.epochs}"
            )
        else:
            self.console.print(
                f"{line}  {100 * self.done // self.steps:3} %, {gone:.0f} s gone, {left:.0f} s left"
            )


def _scheme(row: dict[str, Any]) -> str:
    sparse = "" if row["selection"] == "all" else f" {row['selection']} {row['density']:g}"
    return row["route"] + sparse


# --- after the run ----------------------------------------------------------------------


def write(summary: dict[str, Any], folder: Path) -> None:
    """Write summary.json, learning_curve.png, time_breakdown.png and TensorBoard events into
    `folder`.

    **Ranks:** rank 0 only.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "summary.json.part"
    half.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(half, folder / "summary.json")
    draw(summary, folder)
    write_events(summary, folder / "tensorboard")


def read(folder: Path) -> dict[str, Any]:
    """Read a run's summary.json. **Raises:** ReportError where there is none or where it lacks a
    key.
    """
    path = Path(folder) / "summary.json"
    try:
        summary = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(
            f"A run folder with a summary.json is required. {path}: {error.strerror}."
        ) from error
    except ValueError as error:
        raise ReportError(f"{path} is not JSON: {error}.") from error
    missing = [key for key in REQUIRED if key not in summary]
    if missing:
        raise ReportError(f"{path} lacks {', '.join(missing)}. Train again to write it anew.")
    return summary


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
            _scheme(row),
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


def draw(summary: dict[str, Any], folder: Path) -> None:
    """Draw learning_curve.png and time_breakdown.png into `folder`."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    rows = summary["rows"]
    epochs = [row["epoch"] for row in rows]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(epochs, [row["train_accuracy"] for row in rows], "o--", label="train (varied images)")
    axes.plot(epochs, [row["test_accuracy"] for row in rows], "o-", label="test")
    for before, row in zip([None, *rows[:-1]], rows, strict=True):
        if before is None or (before["resolution"], _scheme(before)) != (
            row["resolution"],
            _scheme(row),
        ):
            axes.axvline(row["epoch"] - 0.5, color="0.8", zorder=0)
            axes.annotate(
                f"{row['resolution']} px, {_scheme(row)}",
                (row["epoch"] - 0.45, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=8,
                color="0.4",
            )
    axes.set(
        xlabel="epoch",
        ylabel="accuracy",
        xticks=epochs,
        title=f"{summary.get('name', 'run')}: test accuracy {summary['test_accuracy']:.4f}",
    )
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(folder / "learning_curve.png", dpi=120)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0] * len(rows)
    for part, meaning in PARTS.items():
        heights = [row["seconds"][part] for row in rows]
        axes.bar(epochs, heights, bottom=bottom, label=meaning)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set(xlabel="epoch", ylabel="seconds on rank 0", xticks=epochs, title="where the time went")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(folder / "time_breakdown.png", dpi=120)


def draw_links(probed: Any, path: Path) -> None:
    """Draw the times that `schedule.probe` measured, and the lines that it fitted, over the size of
    the message.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for kind, colour in (("inside", "tab:blue"), ("between", "tab:orange")):
        link, points = getattr(probed.links, kind), probed.points[kind]
        if points:
            sizes = [size for _, size, _ in points]
            axes.plot(
                sizes,
                [seconds for _, _, seconds in points],
                "o",
                color=colour,
                label=f"{kind} nodes, measured",
            )
            axes.plot(
                sizes,
                [starts * link.alpha_s + size * link.beta_s_per_byte for starts, size, _ in points],
                color=colour,
                label=f"{link.alpha_s * 1e6:.0f} us + {link.beta_s_per_byte * 1e9:.3g} ns per byte",
            )
    axes.set(
        xscale="log", yscale="log", xlabel="bytes that come in through a port", ylabel="seconds"
    )
    if any(probed.points.values()):
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_events(summary: dict[str, Any], folder: Path) -> None:
    """Write the epochs' numbers as TensorBoard scalars, one step per epoch."""
    import tensorflow as tf

    with tf.summary.create_file_writer(str(folder)).as_default():
        for row in summary["rows"]:
            for name in (
                "loss",
                "train_accuracy",
                "test_accuracy",
                "images_per_second",
                "resolution",
                "density",
            ):
                tf.summary.scalar(name, row[name], step=row["epoch"])
            for part, seconds in row["seconds"].items():
                tf.summary.scalar(f"seconds/{part}", seconds, step=row["epoch"])
        tf.summary.flush()
