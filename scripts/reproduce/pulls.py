"""When the forward pass ends under each way of pulling weights: the figure of the iBatch paper.

    python scripts/reproduce/pulls.py                    # 8 nodes of one slot, 1 and 10 Gbit/s
    python scripts/reproduce/pulls.py --json FILE --png docs/pictures/pulls.png

GoogLeNet has its computation in convolutions all along and few weights; VGG-16 has nine tenths of
its weights in the last three layers. For each, by `Profile.from_throughput` at the rate of the GPU
of Shi et al. (2020) (ResNet-50 with 16 images takes 0.18 s, a third of it forward, the others in
proportion to their multiply-adds), the simulated end of the forward pass: default PS (one pull,
then the forward pass), layer by layer, iBatch (the paper's greedy algorithms, the better by its
equation 4), and the exact optimum. A pull is an all-gather among the nodes: its latency is 50 us a
hop ("network"), or 2 ms in all ("servers": finding the servers, and TCP, as in ibatch.yaml).
Columns of the JSON: model, between_gbit, startup_s, method, batches, finish_s, forward_s, gain.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from tfcommx.core import Link, Links, Profile, Topology, replacing, write_text
from tfcommx.planner.merging.pulls import (
    PullTimes,
    at_once,
    finish_s,
    ibatch,
    layer_by_layer,
    optimal,
)
from tfcommx.simulator import models
from tfcommx.strategies.sharded.strategy import layers_of, pull_times

METHODS = {
    "default PS": at_once,
    "layer by layer": layer_by_layer,
    "iBatch": ibatch,
    "optimal": optimal,
}
# Model -> samples of a GPU in a step
BATCHES = {"googlenet": 32, "vgg16": 32}
NODES = 8
# Multiply-adds of a forward pass per second of a whole step
RATE = models.get("resnet50").operations * 16 / 0.18
ALPHA, SERVERS = 5e-5, 2e-3


def times_of(model: str, gbit: float, startup_s: float | None) -> PullTimes:
    """Return the times of the pulls and of each layer's forward pass."""
    table = models.get(model)
    profile = Profile.from_throughput(table, RATE / table.operations, batch=BATCHES[model])
    weights = profile.variables[::-1]
    link = Link(ALPHA, 8e-9 / gbit)
    layers = layers_of([one.name for one in weights])
    times = pull_times(profile, layers, weights, Topology(NODES, 1), Links(link, link))
    return times if startup_s is None else dataclasses.replace(times, startup_s=startup_s)


def rows_of(model: str, gbit: float, startup_s: float | None) -> list[dict[str, Any]]:
    """Simulate every method."""
    times = times_of(model, gbit, startup_s)
    found = {name: solve(times) for name, solve in METHODS.items()}
    slowest = finish_s(found["default PS"], times)
    return [
        {
            "model": model,
            "between_gbit": gbit,
            "startup_s": times.startup_s,
            "method": name,
            "batches": len(batches),
            "finish_s": finish_s(batches, times),
            "forward_s": times.forward_s(0, times.layers),
            "gain": slowest / finish_s(batches, times),
        }
        for name, batches in found.items()
    ]


def grouped(rows: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Return the rows of each setting, by method."""
    step = len(METHODS)
    return [
        {row["method"]: row for row in rows[place : place + step]}
        for place in range(0, len(rows), step)
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Write a Markdown table: milliseconds, and in brackets the gathers."""
    heads = ["model", "Gbit/s", "start-up, ms", *METHODS, "forward alone", "default / iBatch"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for group in grouped(rows):
        one = group["iBatch"]
        cells = [one["model"], f"{one['between_gbit']:g}", f"{1e3 * one['startup_s']:.2f}"]
        cells += [
            f"{1e3 * group[name]['finish_s']:.1f} ({group[name]['batches']})" for name in METHODS
        ]
        cells += [f"{1e3 * one['forward_s']:.1f}", f"{one['gain']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the end of the forward pass over that of the default PS, a panel for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(BATCHES), sharey=True)
    for panel, model in zip(panels, BATCHES, strict=True):
        groups = [group for group in grouped(rows) if group["iBatch"]["model"] == model]
        for number, name in enumerate(METHODS):
            places = [place + 0.2 * number for place in range(len(groups))]
            panel.bar(places, [1 / group[name]["gain"] for group in groups], 0.18, label=name)
        panel.set_xticks(
            [place + 0.3 for place in range(len(groups))],
            [
                f"{group['iBatch']['between_gbit']:g} Gbit/s\n"
                f"{1e3 * group['iBatch']['startup_s']:.2g} ms"
                for group in groups
            ],
        )
        panel.set_title(model)
    panels[0].set_ylabel("end of the forward pass\n/ default PS")
    panels[-1].legend(fontsize=8, loc="upper right")
    with replacing(path) as part:
        figure.savefig(part, dpi=120)


def main() -> None:
    """Simulate all, print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--gbit", nargs="+", type=float, default=[1.0, 10.0])
    options.add_argument("--json", type=Path, help="write one object a line to this file")
    options.add_argument("--png", type=Path, help="draw to this file")
    chosen = options.parse_args()
    rows = [
        row
        for model in BATCHES
        for gbit in chosen.gbit
        for startup_s in (None, SERVERS)
        for row in rows_of(model, gbit, startup_s)
    ]
    print(table(rows))
    if chosen.json:
        write_text(chosen.json, "".join(json.dumps(row) + "\n" for row in rows))
    if chosen.png:
        draw(rows, chosen.png)


if __name__ == "__main__":
    main()
