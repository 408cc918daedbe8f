"""Figures of one or several runs beside each other: how they learned, where time and bytes went."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfcommx.report.summary import PARTS, seconds_by_part

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By the name under which it is shown
Runs = Mapping[str, dict[str, Any]]


def curves(runs: Runs) -> Figure:
    """Draw accuracy over epochs and over time, loss and throughput over epochs."""
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 7), layout="constrained")
    (accuracy, over_time), (loss, rate) = figure.subplots(2, 2)
    for name, summary in runs.items():
        rows = summary["rows"]
        epochs = [row["epoch"] for row in rows]
        minutes = [spent / 60 for spent in seconds_at_ends(rows)]
        tests = [row["test_accuracy"] for row in rows]
        (line,) = accuracy.plot(epochs, tests, "o-", markersize=3, label=name)
        style = {"color": line.get_color(), "markersize": 3}
        trained = [row["train_accuracy"] for row in rows]
        accuracy.plot(epochs, trained, "--", linewidth=0.8, **style)
        over_time.plot(minutes, tests, "o-", **style)
        loss.plot(epochs, [row["loss"] for row in rows], "o-", **style)
        rate.plot(epochs, [row["throughput"] for row in rows], "o-", **style)
    counted = " or ".join(dict.fromkeys(summary["counted"] for summary in runs.values()))
    accuracy.set(xlabel="epoch", ylabel="test accuracy (train: dashed)")
    over_time.set(xlabel="minutes", ylabel="test accuracy")
    loss.set(xlabel="epoch", ylabel="loss in training")
    rate.set(xlabel="epoch", ylabel=f"{counted}/s in training", ylim=(0, None))
    for axes in (accuracy, over_time, loss, rate):
        axes.grid(color="0.92")
        if axes is not over_time:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def seconds_at_ends(rows: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from the start of a run to each epoch's end."""
    return list(itertools.accumulate(sum(row["seconds"].values()) for row in rows))


def costs(runs: Runs) -> Figure:
    """Draw where the time went, and the bytes between nodes beside those of dense gradients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.8 + 0.45 * len(runs)), layout="constrained")
    time, sent = figure.subplots(1, 2, width_ratios=(2, 1))
    _breakdown(time, runs)
    names = list(runs)
    for key, label, colour in (
        ("bytes_between_nodes_dense", "dense gradients", "0.85"),
        ("bytes_between_nodes", "sent", "tab:blue"),
    ):
        height = 0.7 if colour == "0.85" else 0.4
        megabytes = [runs[name][key] / 1e6 for name in names]
        sent.barh(range(len(names)), megabytes, height=height, color=colour, label=label)
    sent.set(xlabel="MB per rank between nodes", yticks=[])
    sent.invert_yaxis()
    sent.legend(fontsize=7)
    return figure


def _breakdown(axes: Axes, runs: Runs) -> None:
    """Stack the parts of each run's time."""
    seconds = {name: seconds_by_part(summary["rows"]) for name, summary in runs.items()}
    left = [0.0] * len(runs)
    for part, meaning in PARTS.items():
        widths = [found[part] for found in seconds.values()]
        if any(widths):
            axes.barh(range(len(runs)), widths, left=left, height=0.7, label=meaning)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="seconds on rank 0", yticks=range(len(runs)), yticklabels=list(runs))
    axes.invert_yaxis()
    axes.figure.legend(loc="outside lower center", ncols=4, fontsize=7)
