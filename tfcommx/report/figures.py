"""Pictures of one run and of measured links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfcommx.report.summary import PARTS, scheme_text, size_text
from tfcommx.terms import Links, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# (latency terms, bytes, seconds) of each measured size
Points = Sequence[tuple[float, float, float]]
# The files that `draw` writes into a run's folder
PICTURES = ("learning_curve.png", "time_breakdown.png")


def draw(summary: dict[str, Any], folder: Path) -> None:
    """Draw the pictures of a run into its folder: how it learned, and where the time went."""
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state

    for name, plot in zip(PICTURES, (_learning_curve, _time_breakdown), strict=True):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        plot(summary, figure.subplots())
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        with replacing(folder / name) as part:
            figure.savefig(part, dpi=120)


def _learning_curve(summary: dict[str, Any], axes: Axes) -> None:
    """Plot the accuracies over the epochs, with a line where resolution or scheme change."""
    rows = summary["rows"]
    epochs = [row["epoch"] for row in rows]
    axes.plot(epochs, [row["train_accuracy"] for row in rows], "o--", label="train (varied)")
    axes.plot(epochs, [row["test_accuracy"] for row in rows], "o-", label="test")
    texts = [f"{size_text(row)}, {scheme_text(row)}" for row in rows]
    for before, text, epoch in zip([None, *texts[:-1]], texts, epochs, strict=True):
        if before != text:
            axes.axvline(epoch - 0.5, color="0.8", zorder=0)
            axes.annotate(
                text,
                (epoch - 0.45, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=8,
                color="0.4",
            )
    title = f"{summary.get('name', 'run')}: test accuracy {summary['test_accuracy']:.4f}"
    axes.set(xlabel="epoch", ylabel="accuracy", xticks=epochs, title=title)


def _time_breakdown(summary: dict[str, Any], axes: Axes) -> None:
    """Stack the parts of each epoch's time."""
    rows = summary["rows"]
    epochs = [row["epoch"] for row in rows]
    bottom = [0.0] * len(rows)
    for part, meaning in PARTS.items():
        heights = [row["seconds"].get(part, 0.0) for row in rows]
        if not any(heights):
            continue
        axes.bar(epochs, heights, bottom=bottom, label=meaning)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set(xlabel="epoch", ylabel="seconds on rank 0", xticks=epochs, title="where the time went")


def draw_links(links: Links, points: Mapping[str, Points], by_engine: bool, path: Path) -> None:
    """Draw measured times over the size of the message, and the fitted lines.

    Args:
        links: as fitted to the times.
        points: "inside", "between" -> latency terms, bytes and seconds of every size.
        by_engine: whether the engine's time is in the points.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, colour in (("inside", "tab:blue"), ("between", "tab:orange")):
        link, measured = getattr(links, kind), points[kind]
        if not measured:
            continue
        sizes = [size for _, size, _ in measured]
        seconds = [seconds for _, _, seconds in measured]
        more = links.engine_s if by_engine else 0.0
        fitted = [
            more + terms * link.alpha_s + size * link.beta_s_per_byte for terms, size, _ in measured
        ]
        text = f"{link.alpha_s * 1e6:.0f} us + {link.beta_s_per_byte * 1e9:.3g} ns per byte"
        axes.plot(sizes, seconds, "o", color=colour, label=f"{kind} nodes, measured")
        axes.plot(sizes, fitted, color=colour, label=text)
    axes.set(
        xscale="log", yscale="log", xlabel="bytes that come in through a port", ylabel="seconds"
    )
    if any(points.values()):
        axes.legend()
    with replacing(path) as part:
        figure.savefig(part, dpi=120)
