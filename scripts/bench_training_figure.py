"""The figure of scripts/bench_training.py: the steps of each scheme, measured and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(rows: list[dict[str, Any]], png: Path) -> None:
    """Draw a panel for each model and rate: measured steps as bars, predicted ones as marks."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(one["model"] for one in rows))
    rates = list(dict.fromkeys(one["rate_mbit"] for one in rows))
    figure = Figure(figsize=(4.5 * len(rates) + 1, 2.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(rates), squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for panel, rate in zip(line, rates, strict=True):
            mine = [one for one in rows if (one["model"], one["rate_mbit"]) == (model, rate)]
            places = range(len(mine))
            panel.barh(places, [1e3 * one["step_seconds"] for one in mine], label="measured")
            predicted = [1e3 * one["predicted_seconds"] for one in mine]
            panel.plot(predicted, places, "k|", markersize=12, label="predicted")
            panel.set_yticks(places, [one["scheme"] for one in mine], fontsize=8)
            panel.invert_yaxis()
            where = "this host" if rate is None else f"{rate:g} Mbit/s"
            panel.set_title(f"{model}, {where}", loc="left", fontsize=9)
            panel.set_xlabel("ms a step", fontsize=8)
    panels[0, 0].legend(fontsize=8)
    figure.savefig(png, dpi=120)
