#!/usr/bin/env python3
r"""Claim: a simulated step takes what a measured one takes, under every scheme.

    python scripts/bench_training.py --nodes 4 --slots 1 --rates 200mbit 1000mbit --json t.jsonl
    python scripts/bench_training.py --nodes 2 --slots 1 --rates none     # on this host, no root
    python scripts/bench_training.py --models resnet50 --batch 16 \
        --schemes none horovod "hitopk block16/float16"

The same model is trained under each scheme, on a virtual cluster (scripts/cluster: needs root and
iproute2) or, at the rate `none`, by as many ranks on this host. Models: convolutional, transformer
(both about a million parameters), embedding (most of its parameters are one), and ResNet-50 at
64 x 64. Schemes: `none` exchanges nothing; `horovod` is plain Horovod, one allreduce for each
gradient; the others are routes, sparse ones with their wire format, and `auto` and `auto sparse`.
A density of its own may follow: "auto sparse 0.05".

`seconds` and `step_seconds` are the median over steps of the slowest rank's time; the schemes take
turns, two steps at a time of which the second counts, and so do the steps of the profile, in
another order each round, because other work on the machine comes and goes. `ratio` is the median,
over the rounds, of the time over plain Horovod's in the same round ("x horovod" is its inverse).
`chosen` says how the gradients travelled, of `auto` what its trial has decided.
`predicted_seconds`: links measured first (probe, also under load), a profile of the model, measured
on all ranks at once (as cx.profile does), and the simulator. The profile says when gradients are
ready and what a selection takes; forward pass, backward pass and update together are as long as the
measured step of `none`, which therefore always takes its turn and is not counted as a prediction.
`none` exchanges nothing; gradients of embeddings are made dense in it, as in an exchange.
`bytes_between` is what a rank sends to other nodes in a step, counted, as the mean over the ranks;
of `horovod`, by its route's formula.
`verified`: a step with known gradients, after the others and by the same plan, gave their average,
and what was not sent is in the residuals; the ranks' weights are equal in the end; the bytes
counted are those that the routes promise; no trial was under way. `none` must leave each rank its
own gradients. With --json the rows of a model are in the file as soon as it has ended.
Options and columns: scripts/benchmark_options.py; `n` is the parameters of the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_training_figure
import benchmark_cluster
import benchmark_options

WORKER = Path(__file__).with_name("bench_training_worker.py")
MODELS = ("convolutional", "transformer", "embedding", "resnet50")
# The scheme that exchanges nothing. Its step is what predictions of the others begin with
ALONE = "none"
SCHEMES = (
    ALONE,
    "horovod",
    "allreduce",
    "torus",
    "hitopk pair32",
    "hitopk block16/float16",
    "allgather pair32",
    "allgather block16/float16",
    "auto",
    "auto sparse",
)


def options() -> argparse.ArgumentParser:
    """Make the parser of the options, which the worker shares."""
    parser = benchmark_options.parser(__doc__, sizes=[], repeats=10, meaning_of_repeats="steps")
    benchmark_cluster.add_options(parser)
    parser.set_defaults(slots=1)
    parser.add_argument(
        "--rates", nargs="+", default=["200mbit"], help="of the nodes' links; none: this host"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS[:3]))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--batch", type=int, default=16, help="samples of a rank")
    parser.add_argument("--density", type=float, default=0.01, help="of sparse routes")
    parser.add_argument("--selection", default="mstopk", help="of sparse routes")
    parser.add_argument("--bucket-bytes", type=int, default=2**20, help="of the mergings by size")
    return parser


def command(chosen: argparse.Namespace, json_file: Path) -> list[str]:
    """Return the worker's command."""
    words: list[Any] = [sys.executable, WORKER, "--json", json_file]
    for name in ("repeats", "batch", "density", "selection", "bucket_bytes", "node_size"):
        if (value := getattr(chosen, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value]
    return [*map(str, words), "--models", *chosen.models, "--schemes", *chosen.schemes]


def run(chosen: argparse.Namespace, rate: str, found: Path) -> tuple[list[dict[str, Any]], int]:
    """Measure at one rate; return the rows that the worker adds to a file, and its status."""
    here = argparse.Namespace(**{**vars(chosen), "rate": rate})
    if rate == "none" and not chosen.hosts:
        here.hosts, here.node_size = f"localhost:{chosen.nodes * chosen.slots}", chosen.slots
    before = len(found.read_text().splitlines())
    status = benchmark_cluster.launch(command(here, found), here)
    return [json.loads(line) for line in found.read_text().splitlines()[before:]], status


def error(one: dict[str, Any]) -> float:
    """Return by how much the prediction is off, over the measured time; 0 of `none`."""
    return one["predicted_seconds"] / one["step_seconds"] - 1


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one model on one cluster."""
    own = {
        "predicted": lambda one: f"{one['predicted_seconds'] * 1e3:.2f}",
        "error": lambda one: f"{error(one):+.1%}",
        "MB between": lambda one: f"{one['bytes_between'] / 1e6:.2f}",
    }
    one = rows[0]
    if one["ratio"] is not None:
        own["x horovod"] = lambda one: f"{1 / one['ratio']:.2f}"
    rate = "this host" if one["rate_mbit"] is None else f"{one['rate_mbit']:g} Mbit/s"
    title = f"{one['model']}, {one['nodes']} nodes of {one['slots']} slots, {rate}"
    benchmark_options.print_table(rows, title, own=own)
    for one in rows:
        if one["scheme"].startswith("auto"):
            print(f"{one['scheme']} has chosen: {one['chosen']}")


def main() -> int:
    chosen = options().parse_args()
    rows, status = [], 0
    with tempfile.TemporaryDirectory() as folder:
        # Not in the folder if it is to stay whatever happens
        found = (chosen.json or Path(folder) / "found.jsonl").resolve()
        found.write_text("")
        for rate in chosen.rates:
            added, ended = run(chosen, rate, found)
            status = status or ended
            for model in chosen.models:
                if mine := [one for one in added if one["model"] == model]:
                    show(mine)
            rows += added
    errors = [abs(error(one)) for one in rows if one["scheme"] != ALONE]
    if errors:
        print(
            f"predicted against measured: {len(errors)} rows, median error "
            f"{statistics.median(errors):.1%}, largest {max(errors):.1%}"
        )
    png, chosen.png = chosen.png, None
    if png and rows:
        bench_training_figure.draw(rows, png)
    unverified = benchmark_options.finish(rows, chosen)
    return status or unverified or int(not rows)


if __name__ == "__main__":
    raise SystemExit(main())
