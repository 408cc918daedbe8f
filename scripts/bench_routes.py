#!/usr/bin/env python3
r"""Claim: if the network between nodes is slow, the routes for slow networks beat an allreduce.

    python scripts/bench_routes.py --nodes 4 --slots 2 --rate 200mbit --sizes 25000000 \
        --density 0.01 --probe --json routes.json
    python scripts/bench_routes.py --sizes 1000000 --launcher mpi        # quick; MPI, not Gloo
    python scripts/bench_routes.py --hosts a:8,b:8 --sizes 25000000      # real machines, no root
    python scripts/bench_routes.py --figure docs/pictures/routes.png --json f.json  # also predicted

Horovod's allreduce is `allreduce plain`, with its own fp16 compression `allreduce float16`. Makes a
virtual cluster (scripts/cluster: needs root and iproute2), runs scripts/bench_routes_worker.py on
its ranks, removes the cluster. One gradient of n float32 is exchanged as in training, in a compiled
step; a row's name is the route and the wire format. `seconds` is the median over the steps of the
slowest rank's time. `wire_bytes` is what a rank sends to other nodes, as the mean over the ranks.
`limit_seconds` is the route's own: the bytes through its busiest port, in the busier direction,
over the rate of a plain socket between two nodes in the same run. `verified`: every entry of the
gradients has arrived or is in a residual, on all ranks alike, and the bytes that were counted on
the way are those that the route promises. `torus+pipeline` is the torus with the pipeline among
peers. Options and columns:
scripts/benchmark_options.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_routes_figure
import benchmark_cluster
import benchmark_options

WORKER = Path(__file__).with_name("bench_routes_worker.py")


def options() -> argparse.ArgumentParser:
    """Make the parser of the options, which the worker shares."""
    parser = benchmark_options.parser(
        __doc__, sizes=[1_000_000], repeats=3, meaning_of_sizes="entries of the gradient"
    )
    benchmark_cluster.add_options(parser)
    parser.add_argument("--rate", default="200mbit", help="of each node's link, each way")
    parser.add_argument("--density", type=float, default=0.01, help="of sparse routes")
    parser.add_argument("--selection", default="mstopk", help="of sparse routes")
    parser.add_argument("--routes", nargs="+", help="default: all")
    parser.add_argument("--wires", nargs="+", help="formats; default: all that a route writes")
    parser.add_argument(
        "--figure",
        type=Path,
        metavar="PNG",
        help="draw routes of messages over 2, 4 and 8 nodes, beside what they should cost",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="measure the links first, plan with them, and say what they predict",
    )
    return parser


def command(chosen: argparse.Namespace, json_file: Path) -> list[str]:
    """Return the worker's command."""
    wanted = {
        "--json": [json_file],
        "--density": [chosen.density],
        "--selection": [chosen.selection],
        "--repeats": [chosen.repeats],
        "--sizes": chosen.sizes,
        "--routes": chosen.routes,
        "--wires": chosen.wires,
        "--node-size": [chosen.node_size] if chosen.node_size else None,
    }
    words = [sys.executable, WORKER]
    for option, values in wanted.items():
        words += [option, *values] if values else []
    return [*map(str, words), *(["--probe"] if chosen.probe else [])]


def run(chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Measure on one cluster; return the rows and the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        status = benchmark_cluster.launch(command(chosen, found), chosen)
        lines = found.read_text().splitlines() if found.exists() else []
    return [json.loads(line) for line in lines], status


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one cluster."""
    plain = (one for one in rows if (one["route"], one["wire"]) == ("allreduce", "plain"))
    horovod = {one["n"]: one["seconds"] for one in plain}

    def faster(one: dict[str, Any]) -> str:
        return f"{horovod[one['n']] / one['seconds']:.2f}" if one["n"] in horovod else "-"

    own = {"x allreduce": faster, "MB sent": lambda one: f"{one['wire_bytes'] / 1e6:.2f}"}
    if any("predicted_seconds" in one for one in rows):
        own["predicted, ms"] = lambda one: f"{one['predicted_seconds'] * 1e3:.2f}"
    one = rows[0]
    title = f"{one['nodes']} nodes of {one['slots']} slots, {one['rate_mbit']:g} Mbit/s"
    benchmark_options.print_table(rows, title, own=own)


def main() -> int:
    chosen = options().parse_args()
    clusters = [chosen.nodes]
    if chosen.figure:
        clusters = bench_routes_figure.NODES
        chosen.slots, chosen.launcher, chosen.probe = 1, "mpi", True
        chosen.sizes, chosen.routes = bench_routes_figure.SIZES, bench_routes_figure.ROUTES
    rows, status = [], 0
    for nodes in clusters:
        found, ended = run(argparse.Namespace(**{**vars(chosen), "nodes": nodes}))
        rows, status = rows + found, status or ended
        if found:
            show(found)
    if chosen.figure and not status:
        bench_routes_figure.draw(rows, chosen.figure)
    unverified = benchmark_options.finish(rows, chosen)
    return status or unverified or int(not rows)


if __name__ == "__main__":
    raise SystemExit(main())
