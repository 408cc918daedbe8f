"""A picture of machines to rent: the cost of an epoch over its time, and the scaling efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfcommx.terms import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]


def draw_machines(rows: Sequence[Row], path: Path) -> None:
    """Draw a line over the nodes of each machine, in two panels for each model.

    Args:
        rows: the best scheme of each cell, as `tfcommx machines` writes them.
        path: of the picture; its suffix, such as .svg or .png, says how it is written.
    """
    from matplotlib.figure import Figure  # Without pyplot: no display, no global state

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(9, 0.6 + 3.8 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for model, (left, right) in zip(models, panels, strict=True):
        mine = [row for row in rows if row["model"] == model]
        for name, line in _lines(mine).items():
            _draw_line(left, right, name, line)
        ringed = [row for row in mine if row["unbeaten"]]
        left.plot(
            *_minutes_and_costs(ringed),
            "o",
            markersize=11,
            markerfacecolor="none",
            markeredgecolor="0.3",
            label="nothing is both faster and cheaper",
        )
        left.set(xlabel="minutes of an epoch", ylabel="cost of an epoch", title=model)
        left.set_ylim(0, 1.1 * max(row["epoch_cost"] for row in mine))
        right.set(xlabel="ranks", ylabel="scaling efficiency", ylim=(0, 1.05))
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    with replacing(path) as part:
        figure.savefig(part, dpi=120)


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each machine; where a file lists other values than nodes, of each value.

    >>> row = {"machine": "a", "model": "m", "nodes": 2, "slots": 1, "between_gbit": 10, "ranks": 2}
    >>> list(_lines([row, {**row, "nodes": 4}, {**row, "between_gbit": 25}]))
    ['a, between_gbit 10', 'a, between_gbit 25']
    """
    names = list(rows[0])
    listed = [x for x in names[1 : names.index("ranks")] if x not in ("model", "nodes")]
    found: dict[str, list[Row]] = {}
    for row in rows:
        values = {x: {o[x] for o in rows if o["machine"] == row["machine"]} for x in listed}
        several = [f"{x} {_in_words(row[x])}" for x in listed if len(values[x]) > 1]
        found.setdefault(", ".join([row["machine"], *several]), []).append(row)
    return found


def _in_words(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _draw_line(left: Axes, right: Axes, name: str, rows: Sequence[Row]) -> None:
    minutes, costs = _minutes_and_costs(rows)
    left.plot(minutes, costs, "o-", label=name)
    for row, minute in zip(rows, minutes, strict=True):
        left.annotate(
            str(row["nodes"]),
            (minute, row["epoch_cost"]),
            xytext=(4, 5),
            textcoords="offset points",
            fontsize=7,
        )
    ranks = [row["ranks"] for row in rows]
    right.plot(ranks, [row["scaling_efficiency"] for row in rows], "o-")


def _minutes_and_costs(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    minutes = [row["epoch_seconds"] / 60 for row in rows]
    return minutes, [row["epoch_cost"] for row in rows]
