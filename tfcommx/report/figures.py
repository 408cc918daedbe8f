"""Figures of a run and of measured links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfcommx.report.summary import PARTS, scheme_text


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
        if before is None or (before["resolution"], scheme_text(before)) != (
            row["resolution"],
            scheme_text(row),
        ):
            axes.axvline(row["epoch"] - 0.5, color="0.8", zorder=0)
            axes.annotate(
                f"{row['resolution']} px, {scheme_text(row)}",
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
