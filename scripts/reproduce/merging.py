"""How much the mergings of the papers leave on the table, model by model.

    python scripts/reproduce/merging.py                  # 16 nodes of one slot, 1 and 10 Gbit/s
    python scripts/reproduce/merging.py --json FILE      # one object a line

For each model, cluster and kind of exchange: the simulated step of every merging over that of
`optimal`, and the seconds of the optimum beyond a step without exchange. The models compute at the
rate of the GPU of Shi et al. (2020): ResNet-50 with 16 images takes 0.18 s (section I), the others
in proportion to their multiply-adds. Dense gradients travel by `allreduce`; of sparse ones 0.001
by `allgather`, every tensor, selected exactly at gamma = 2.19e-10 d log2 d on the compute stream;
once with the latency of the network, once with the 22 ms that the authors' messages need.
Columns of the JSON: model, exchange, between_gbit, merging, groups, step_seconds, compute_seconds,
over_optimal, seconds_of_search.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from tfcommx.core import Link, Links, Profile, Scheme, Topology, write_text
from tfcommx.planner import merging
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.simulator import models
from tfcommx.simulator.assumptions import Assumptions, sorting_time
from tfcommx.simulator.step import simulate

# Model -> samples of a GPU in a step: table IV of the paper; the others as they fit such a GPU
BATCHES = {
    "resnet50": 16,
    "vgg16": 32,
    "inception_v4": 32,
    "lstm_ptb": 100,
    "transformer_base": 64,
    "bert_base": 8,
}
NODES = 16
GAMMA = 2.18896957e-10
# Multiply-adds of a forward pass per second of a whole step
RATE = models.get("resnet50").operations * 16 / 0.18
# Seconds a hop, and reduction at 100 GB/s
ALPHA, ADDING = 5e-5, 1e-11


def dense(name: str) -> Scheme:
    return Scheme("allreduce", merging=name)


def sparse(name: str) -> Scheme:
    return Scheme("allgather", "exact", 0.001, dense_below=0, merging=name)


# Kind -> (merging -> scheme, seconds of a message besides its price). The authors' all-gathers need
# 2 x 11 ms however short they are (HKBU-HPML/OMGS-SGD, utils.py).
EXCHANGES = {"dense": (dense, 0.0), "sparse": (sparse, 0.0), "sparse + 22 ms": (sparse, 0.022)}


def rows_of(model: str, exchange: str, gbit: float) -> list[dict[str, Any]]:
    """Simulate a step under every merging."""
    table = models.get(model)
    profile = Profile.from_throughput(table, RATE / table.operations, batch=BATCHES[model])
    # With two dimensions all are in one stream: in the paper biases are sparse, too
    variables = [dataclasses.replace(one, shape=(1, *one.shape)) for one in profile.variables]
    profile = dataclasses.replace(profile, variables=tuple(variables))
    gradients = [Gradient(one.name, one.shape, one.dtype) for one in reversed(variables)]
    link = Link(ALPHA, 8e-9 / gbit, ADDING)
    links, topology = Links(link, link), Topology(NODES, 1)
    make_scheme, engine_s = EXCHANGES[exchange]
    assumptions = Assumptions(sorting_time(GAMMA), engine_s=engine_s)
    found = []
    for name in merging.MERGINGS:
        start = time.process_time()
        plan = make_plan(
            gradients,
            {"*": make_scheme(name)},
            topology,
            links=links,
            profile=profile,
            assumptions=assumptions,
        )
        seconds = time.process_time() - start
        timeline = simulate(plan, profile, links, assumptions)
        found.append(
            {
                "model": model,
                "exchange": exchange,
                "between_gbit": gbit,
                "merging": name,
                "groups": len(plan.buckets),
                "step_seconds": timeline.step_s,
                "compute_seconds": timeline.compute_s,
                "seconds_of_search": seconds,
            }
        )
    best = next(row["step_seconds"] for row in found if row["merging"] == "optimal")
    return [{**row, "over_optimal": row["step_seconds"] / best} for row in found]


def table(rows: list[dict[str, Any]]) -> str:
    """Write a Markdown table: a line for each setting, a column for each merging."""
    names = [name for name in merging.MERGINGS if name != "optimal"]
    heads = ["model", "exchange", "Gbit/s", *names, "optimal, s", "without exchange, s", "groups"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for place in range(0, len(rows), len(merging.MERGINGS)):
        group = {row["merging"]: row for row in rows[place : place + len(merging.MERGINGS)]}
        best = group["optimal"]
        cells = [best["model"], best["exchange"], f"{best['between_gbit']:g}"]
        cells += [f"{group[name]['over_optimal']:.3f}" for name in names]
        cells += [f"{best['step_seconds']:.3f}", f"{best['compute_seconds']:.3f}"]
        lines.append("| " + " | ".join([*cells, str(best["groups"])]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Simulate all, print the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    options.add_argument("--gbit", nargs="+", type=float, default=[1.0, 10.0])
    options.add_argument("--json", type=Path, help="write one object a line to this file")
    chosen = options.parse_args()
    rows = [
        row
        for model in chosen.models
        for exchange in EXCHANGES
        for gbit in chosen.gbit
        for row in rows_of(model, exchange, gbit)
    ]
    print(table(rows))
    if chosen.json:
        write_text(chosen.json, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
