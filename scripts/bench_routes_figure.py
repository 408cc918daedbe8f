"""The figure of docs/explanation/routes.md: routes of messages, measured beside predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NODES = [2, 4, 8]
SIZES = [250_000, 1_000_000, 4_000_000]
ROUTES = ["pipeline", "tree", "bidirectional"]
COLOURS = ("tab:blue", "tab:orange", "tab:green")


def draw(rows: list[dict[str, Any]], png: Path) -> None:
    """Draw the seconds of each route over n, a panel for each number of nodes.

    Args:
        rows: of scripts/bench_routes.py, with `predicted_seconds`.
        png: the file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = figure.subplots(1, len(NODES), sharey=True)
    for panel, nodes in zip(panels, NODES, strict=True):
        for route, colour in zip(ROUTES, COLOURS, strict=True):
            mine = [row for row in rows if (row["nodes"], row["route"]) == (nodes, route)]
            sizes = [row["n"] for row in mine]
            measured = [row["seconds"] for row in mine]
            predicted = [row["predicted_seconds"] for row in mine]
            panel.plot(sizes, measured, "o", color=colour, label=f"{route}, measured")
            panel.plot(sizes, predicted, color=colour, label="predicted")
        panel.set(
            xscale="log",
            yscale="log",
            xlabel="entries, float32",
            title=f"{nodes} nodes x 1 slot, {rows[0]['rate_mbit']:g} Mbit/s",
        )
        panel.set_xticks(SIZES, [f"{n:,}" for n in SIZES], minor=False)
        panel.set_xticks([], minor=True)
    panels[0].set_ylabel("seconds per allreduce")
    panels[0].legend()
    figure.savefig(png, dpi=110)
