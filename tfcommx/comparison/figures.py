"""Figures of a comparison: the score over time at each bandwidth, and over bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfcommx.comparison.rows import Comparison, Curve
from tfcommx.comparison.tables import rate_text
from tfcommx.core import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "comparison.png"


def draw(comparison: Comparison, path: Path) -> None:
    """Draw a panel for each bandwidth and one for bytes: means and ranges over the seeds."""
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state

    panels = len(comparison.steps) + 1
    columns = min(panels, 2)
    lines = math.ceil(panels / columns)
    figure = Figure(figsize=(5 * columns, 3.5 * lines + 0.6), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    runs = comparison.trainings.items()
    sent = {name: [comparison.by_bytes(run) for run in of_method] for name, of_method in runs}
    _panel(axes[0], comparison, sent, 1e-6)
    axes[0].set(xlabel="MB that a rank sent to other nodes")
    for panel, steps in zip(axes[1:], comparison.steps, strict=False):
        timed = {
            name: [comparison.by_time(run, steps.seconds[name]) for run in of_method]
            for name, of_method in runs
        }
        _panel(panel, comparison, timed)
        how = "measured" if steps.ratios else "predicted"
        panel.set(xlabel=f"seconds at {rate_text(steps.bandwidth)}, {how}")
    for empty in axes[panels:]:
        empty.remove()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    with replacing(path) as part:
        figure.savefig(part, dpi=120)


def _panel(
    axes: Axes, comparison: Comparison, by_method: dict[str, list[Curve]], unit: float = 1.0
) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for name, curves in by_method.items():
        costs = [unit * cost for cost in _by_epoch(curves, "costs", statistics.fmean)]
        (line,) = axes.plot(
            costs, _by_epoch(curves, "scores", statistics.fmean), "o-", markersize=3, label=name
        )
        lowest, highest = (_by_epoch(curves, "scores", pick) for pick in (min, max))
        axes.fill_between(costs, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(comparison.wanted(), color="0.6", linewidth=0.8, linestyle=":")
    axes.set(ylabel=comparison.score.text)
    # No point has a positive cost if all trainings diverged, or sent no bytes on a single node;
    # Matplotlib refuses a log scale then
    if math.isfinite(axes.dataLim.minposx):
        axes.set(xscale="log")
        # A panel may show less than a decade, which would otherwise have one label or none
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(color="0.92")


def _by_epoch(
    curves: Sequence[Curve], field: str, combine: Callable[[Sequence[float]], float]
) -> list[float]:
    return [
        combine(values) for values in zip(*(getattr(curve, field) for curve in curves), strict=True)
    ]
