"""Figures of measured links, and of machines to rent."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfcommx.core import Links, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

# (latency terms, bytes, seconds) of each measured size
Points = Sequence[tuple[float, float, float]]


def draw_links(links: Links, points: Mapping[str, Points], by_engine: bool, path: Path) -> None:
    """Draw measured times over the size of the message, and the fitted lines.

    Args:
        points: "inside", "between" -> latency terms, bytes and seconds of every size.
        by_engine: True if the measured times include the engine's.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, colour in (("inside", "tab:blue"), ("between", "tab:orange")):
        link, measured = getattr(links, kind), points[kind]
        if not measured:  # On one node, or with one rank on each
            continue
        sizes = [size for _, size, _ in measured]
        seconds = [seconds for _, _, seconds in measured]
        engine_s = links.engine_s if by_engine else 0.0
        fitted = [
            engine_s + terms * link.alpha_s + size * link.beta_s_per_byte
            for terms, size, _ in measured
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


Row = dict[str, Any]


def draw_machines(rows: Sequence[Row], path: Path) -> None:
    """Draw a line over the nodes of each machine, in two panels for each model.

    Args:
        rows: the best scheme of each cell, as `tfcommx machines` writes them.
        path: the picture to write; its suffix, such as .svg or .png, decides the format.
    """
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state

    # By a dictionary, so that panels keep the order of the rows, which a set would not
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(9, 0.6 + 3.8 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    # The colour of a line in all panels, because they share the legend
    colours: dict[str, str] = {}
    legend: dict[str, Line2D] = {}
    for model, (cost_axes, scaling_axes) in zip(models, panels, strict=True):
        model_rows = [row for row in rows if row["model"] == model]
        for name, line in _lines(model_rows).items():
            colour = colours.setdefault(name, f"C{len(colours)}")
            legend[name] = _draw_line(cost_axes, scaling_axes, colour, line)
        ringed = [row for row in model_rows if row["unbeaten"]]
        (rings,) = cost_axes.plot(
            *_minutes_and_costs(ringed),
            "o",
            markersize=11,
            markerfacecolor="none",
            markeredgecolor="0.3",
        )
        cost_axes.set(xlabel="minutes of an epoch", ylabel="cost of an epoch", title=model)
        cost_axes.set_ylim(0, 1.1 * max(row["epoch_cost"] for row in model_rows))
        scaling_axes.set(xlabel="ranks", ylabel="scaling efficiency", ylim=(0, 1.05))
        for axes in (cost_axes, scaling_axes):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
    legend["nothing is both faster and cheaper"] = rings
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, fontsize=8)
    with replacing(path) as part:
        figure.savefig(part, dpi=120)


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by machine and by those of its settings, except nodes, with several values.

    >>> row = {"machine": "a", "model": "m", "nodes": 2, "slots": 1, "between_gbit": 10, "ranks": 2}
    >>> list(_lines([row, {**row, "nodes": 4}, {**row, "between_gbit": 25}]))
    ['a, between_gbit 10', 'a, between_gbit 25']
    """
    names = list(rows[0])
    # Models have panels, and nodes are the points of a line
    listed = [x for x in names[1 : names.index("ranks")] if x not in ("model", "nodes")]
    lines: dict[str, list[Row]] = {}
    for row in rows:
        values = {x: {o[x] for o in rows if o["machine"] == row["machine"]} for x in listed}
        several = [f"{x} {_in_words(row[x])}" for x in listed if len(values[x]) > 1]
        lines.setdefault(", ".join([row["machine"], *several]), []).append(row)
    return lines


def draw_map(rows: Sequence[Row], path: Path) -> None:
    """Draw how many times faster each scheme is than the first one, over the rate between nodes.

    A panel for each model and machine; lines are medians over the numbers of nodes, and bands reach
    from the least to the most.

    Args:
        rows: all schemes of all cells, as `tfcommx machines` writes them.
        path: the picture to write; its suffix, such as .svg or .png, decides the format.
    """
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state

    models, machines, schemes = (
        list(dict.fromkeys(row[name] for row in rows)) for name in ("model", "machine", "scheme")
    )
    speedups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = row["model"], row["machine"], row["scheme"], row["between_gbit"]
        speedups.setdefault(key, []).append(row["speedup"])
    rates = sorted({row["between_gbit"] for row in rows})
    figure = Figure(
        figsize=(2.6 * len(machines) + 1, 1.8 * len(models) + 0.8), layout="constrained"
    )
    grid = figure.subplots(len(models), len(machines), squeeze=False, sharex=True, sharey="row")
    lines: dict[str, Line2D] = {}
    for (model, machine), axes in zip(itertools.product(models, machines), grid.flat, strict=True):
        axes.set(xscale="log", yscale="log", xticks=rates)
        axes.minorticks_off()
        axes.set_title(f"{model}, {machine}", fontsize=10)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        for number, scheme in enumerate(schemes[1:]):
            values = [speedups.get((model, machine, scheme, rate), []) for rate in rates]
            # A machine with other rates, or on which the scheme is impossible
            if not all(values):
                axes.set_visible(False)
                break
            medians = list(map(statistics.median, values))
            (lines[scheme],) = axes.plot(rates, medians, f"C{number}.-", label=scheme)
            least, most = list(map(min, values)), list(map(max, values))
            axes.fill_between(rates, least, most, color=f"C{number}", alpha=0.08, linewidth=0)
    for axes in grid[-1]:
        axes.set_xlabel("Gbit/s between nodes", fontsize=9)
    figure.supylabel(f"times faster than {schemes[0]}", fontsize=9)
    columns = 2 * len(machines) + 1
    figure.legend(handles=[*lines.values()], loc="outside lower center", ncols=columns, fontsize=8)
    with replacing(path) as part:
        figure.savefig(part, dpi=100)


def _in_words(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _draw_line(cost_axes: Axes, scaling_axes: Axes, colour: str, rows: Sequence[Row]) -> Line2D:
    minutes, costs = _minutes_and_costs(rows)
    (line,) = cost_axes.plot(minutes, costs, "o-", color=colour)
    for row, minute in zip(rows, minutes, strict=True):
        cost_axes.annotate(
            str(row["nodes"]),
            (minute, row["epoch_cost"]),
            xytext=(4, 5),
            textcoords="offset points",
            fontsize=7,
        )
    ranks = [row["ranks"] for row in rows]
    scaling_axes.plot(ranks, [row["scaling_efficiency"] for row in rows], "o-", color=colour)
    return line


def _minutes_and_costs(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    minutes = [row["epoch_seconds"] / 60 for row in rows]
    return minutes, [row["epoch_cost"] for row in rows]
