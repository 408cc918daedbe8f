"""Figures that compare runs: how they learned, where time and bytes went."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfcommx.report.summary import PARTS, seconds_by_part

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By the name under which it is shown
Runs = Mapping[str, dict[str, Any]]


def curves(runs: Runs) -> Figure:
    """Draw all panels of how the runs learned into one picture."""
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state

    figure = Figure(figsize=(10, 7), layout="constrained")
    for draw, axes in zip(LEARNING.values(), figure.subplots(2, 2).flat, strict=True):
        draw(axes, runs)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def panels(runs: Runs) -> dict[str, Figure]:
    """Draw a figure for each panel of how the runs learned, by its title."""
    from matplotlib.figure import Figure

    found = {}
    for what, draw in LEARNING.items():
        found[what] = Figure(figsize=(5, 3.4), layout="constrained")
        axes = found[what].subplots()
        draw(axes, runs)
        if len(runs) > 1:
            axes.legend(fontsize=8)
    return found


def _accuracy(axes: Axes, runs: Runs) -> None:
    for name, summary in runs.items():
        rows = summary["rows"]
        (line,) = axes.plot(*_by_epoch(rows, "test_accuracy"), "o-", markersize=3, label=name)
        axes.plot(*_by_epoch(rows, "train_accuracy"), "--", linewidth=0.8, color=line.get_color())
    axes.set(ylabel="test accuracy (train: dashed)")
    _by_whole_epochs(axes)


def _accuracy_over_time(axes: Axes, runs: Runs) -> None:
    for name, summary in runs.items():
        minutes = [spent / 60 for spent in seconds_at_ends(summary["rows"])]
        _, tests = _by_epoch(summary["rows"], "test_accuracy")
        axes.plot(minutes, tests, "o-", markersize=3, label=name)
    axes.set(xlabel="minutes", ylabel="test accuracy")
    axes.grid(color="0.92")


def _loss(axes: Axes, runs: Runs) -> None:
    for name, summary in runs.items():
        axes.plot(*_by_epoch(summary["rows"], "loss"), "o-", markersize=3, label=name)
    axes.set(ylabel="loss in training")
    _by_whole_epochs(axes)


def _throughput(axes: Axes, runs: Runs) -> None:
    for name, summary in runs.items():
        axes.plot(*_by_epoch(summary["rows"], "throughput"), "o-", markersize=3, label=name)
    counted = " or ".join(dict.fromkeys(summary["counted"] for summary in runs.values()))
    axes.set(ylabel=f"{counted}/s in training", ylim=(0, None))
    _by_whole_epochs(axes)


# What a panel shows -> what draws it, in the order of the picture
LEARNING: dict[str, Callable[[Axes, Runs], None]] = {
    "accuracy over epochs": _accuracy,
    "accuracy over time": _accuracy_over_time,
    "loss over epochs": _loss,
    "throughput over epochs": _throughput,
}


def _by_epoch(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [row["epoch"] for row in rows], [row[name] for row in rows]


def _by_whole_epochs(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="epoch")
    axes.grid(color="0.92")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def seconds_at_ends(rows: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from the start of a run to each epoch's end."""
    return list(itertools.accumulate(sum(row["seconds"].values()) for row in rows))


def time_spent(runs: Runs) -> Figure:
    """Stack the parts of each run's time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 2.0 + 0.4 * len(runs)), layout="constrained")
    axes = figure.subplots()
    seconds = {name: seconds_by_part(summary["rows"]) for name, summary in runs.items()}
    left = [0.0] * len(runs)
    for part, meaning in PARTS.items():
        widths = [found[part] for found in seconds.values()]
        if any(widths):
            axes.barh(range(len(runs)), widths, left=left, height=0.7, label=meaning)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="seconds on rank 0", yticks=range(len(runs)), yticklabels=list(runs))
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    return figure


def bytes_sent(runs: Runs) -> Figure:
    """Draw the bytes between nodes beside those of dense gradients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 1.4 + 0.4 * len(runs)), layout="constrained")
    axes, names = figure.subplots(), list(runs)
    for key, label, colour, height in (
        ("bytes_between_nodes_dense", "dense gradients", "0.85", 0.7),
        ("bytes_between_nodes", "sent", "tab:blue", 0.4),
    ):
        megabytes = [runs[name][key] / 1e6 for name in names]
        axes.barh(range(len(names)), megabytes, height=height, color=colour, label=label)
    axes.set(xlabel="MB per rank between nodes", yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    return figure


def between_nodes(runs: Runs) -> bool:
    """Tell whether any of the runs had several nodes, and so bytes between them."""
    return any(summary["bytes_between_nodes_dense"] for summary in runs.values())
