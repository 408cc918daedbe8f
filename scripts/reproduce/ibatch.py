"""Predicts the speed-ups of iBatch on 30 nodes; see ibatch.yaml. Columns are speed-ups.

python scripts/reproduce/ibatch.py
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from reproduction import CALIBRATED, NOT_SCORED, SCORED, main, read, row, solve, verdict

from tfcommx.core import LayerTable
from tfcommx.core.profile import FORWARD_SHARE
from tfcommx.planner.merging.pulls import (
    PullTimes,
    at_once,
    finish_s,
    ibatch,
    layer_by_layer,
)
from tfcommx.simulator import models
from tfcommx.simulator.models.builder import dense

METHODS = {"default": at_once, "layer by layer": layer_by_layer, "iBatch": ibatch}


def table_of(data: dict[str, Any], model: str) -> LayerTable:
    """Return the layers of a model; VGG19-22K is VGG-19 with more classes."""
    if model != "vgg19_22k":
        return models.get(model)
    table = models.get("vgg19")
    classes = dense("classes", 4096, data["classes"])
    return dataclasses.replace(table, name=model, layers=(*table.layers[:-1], classes))


def speedup(data: dict[str, Any], name: str, method: str, seconds_per_multiply_add: float) -> float:
    """Return the throughput of all nodes over that of one."""
    known, about = data["assumed"], data["rows"][name]
    table = table_of(data, about["model"])
    compute_s = table.operations / FORWARD_SHARE * seconds_per_multiply_add
    # A blade's port carries the parameters that its nodes pull from the other blades
    nodes, blades = known["nodes"], known["blades"]
    share = nodes / blades * (1 - 1 / blades)
    beta = share * 8e-9 / known["gbit"] / known["efficiency"]
    bytes_each = 4e6 * about["parameters"] / table.parameters
    sizes = [sum(math.prod(shape) for _, shape in layer.variables) for layer in table.layers]
    times = PullTimes(
        known["startup_s"],
        tuple(beta * bytes_each * size for size in sizes),
        tuple(layer.operations * seconds_per_multiply_add for layer in table.layers),
    )
    push_s = times.pull_s(0, times.layers)
    forward_s = finish_s(METHODS[method](times), times)
    return nodes * compute_s / (forward_s + compute_s * (1 - FORWARD_SHARE) + push_s)


def run() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and the verdict."""
    data = read("ibatch")
    chosen = data["calibrated"]["seconds_per_multiply_add"]
    where = (chosen["row"], chosen["column"])
    wanted = data["rows"][where[0]]["speedup"][data["columns"].index(where[1])]
    pace = solve(lambda x: speedup(data, *where, x), wanted, 1e-12, 1e-7)
    rows = []
    for name, about in data["rows"].items():
        for method, published in zip(data["columns"], about["speedup"], strict=True):
            reason = data["not_scored"].get(method, "")
            role = NOT_SCORED if reason else SCORED
            role = CALIBRATED if (name, method) == where else role
            both = (data["assumed"]["seconds_per_multiply_add"], pace)
            found = (speedup(data, name, method, x) for x in both)
            text = f"{method}: {reason}" if reason else ""
            rows.append(row("ibatch", f"{name}, {method}", published, *found, None, role, text))
    said = [
        f"{pace:.3g} s for each multiply-add of a node's batch, from {', '.join(where)}",
        f"not scored: 72 nodes: {data['not_scored']['72 nodes']}",
        verdict("speed-ups on 30 nodes", rows, data["goal"]),
    ]
    return rows, said


if __name__ == "__main__":
    main(__doc__, run)
