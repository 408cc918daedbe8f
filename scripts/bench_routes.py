#!/usr/bin/env python3
r"""Time every route of tfcommx.routes on a slow network, and check each answer while it is timed.

Claim: where the network between nodes is slow, the routes for slow networks beat Horovod's
allreduce (route `allreduce`).

    python scripts/bench_routes.py --nodes 4 --slots 2 --rate 200mbit --sizes 25000000 \
        --density 0.01 --probe --json routes.json
    python scripts/bench_routes.py --sizes 1000000 --launcher mpi        # quick; MPI, not Gloo
    python scripts/bench_routes.py --hosts a:8,b:8 --sizes 25000000      # real machines, no root
    python scripts/bench_routes.py --figure docs/routes.png --json f.json  # messages: predicted too

Makes a virtual cluster (scripts/cluster: needs root and iproute2), runs itself on its ranks,
removes it. One gradient of n float32 is exchanged as training does it, in a compiled step.
`seconds` is the median over the steps of the slowest rank's time. `wire_bytes` is what a rank sends
to other nodes, as the mean over the ranks. `limit_seconds` is the route's own: the bytes through
its busiest port, in the busier direction, over the rate of a plain socket between two nodes in the
same run.
`verified`: every entry of the gradients has arrived or is still owed, on all ranks alike, and the
bytes that were counted on the way are those that the route promises. `torus+pipeline` is the torus
with the pipeline among peers.

The gradients are small integers: sums are exact in any order. They are compared by an exact
weighted sum with integer weights, so that nothing large has to travel for the check.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# before NumPy: the threads that check one step would spin on into the next one
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PERIOD = 1009  # of the weights that entries are compared by
# of as many entries at once
WEIGHTS = np.tile(np.arange(PERIOD, dtype=np.int64) * 7927 % PERIOD + 1, 1024).astype(np.float64)
# bytes of a message; those between pass a virtual cluster's links in one burst, too soon
PROBED = (2**10, 2**12, 2**22, 2**24)
FIGURE = {
    "nodes": (2, 4, 8),
    "sizes": [250_000, 1_000_000, 4_000_000],
    "routes": ["pipeline", "tree", "bidirectional"],
}
# steps that are not counted: the first is traced, both touch their memory for the first time
WARM_UP = 2
SOCKET_SECONDS = 2.0  # how long the plain socket is measured

# --- on the ranks -----------------------------------------------------------------------


def gradient(rank: int, n: int) -> np.ndarray:
    """Integers in [-8, 8] as float32[n], other ones on every rank."""
    return np.resize(
        ((np.arange(17) * (7919 + 2 * rank) + 31 * rank) % 17 - 8).astype(np.float32), n
    )


def weighted_sum(vector: np.ndarray) -> float:
    """Sum of vector[i] * (i * 7927 % 1009 + 1): exact for integers while it stays below 2^53."""
    parts = (
        vector[start : start + len(WEIGHTS)].astype(np.float64)
        for start in range(0, len(vector), len(WEIGHTS))
    )
    return sum(float(part @ WEIGHTS[: len(part)]) for part in parts)


def socket_rate(comm: Any) -> float:
    """Bytes per second that a plain socket carries from rank 0 to the first rank of the next node.
    **Ranks:** all.
    """
    from tfcommx.comm import liveness
    from tfcommx.comm.launcher import launch_interfaces

    other = comm.topology.slots
    if comm.topology.nodes == 1:
        raise SystemExit(
            "At least two nodes are required: the limit is that of the link between nodes."
        )
    listening = socket.create_server(("", 0))
    places = comm.gather_objects(
        (liveness.addresses(launch_interfaces())[0], listening.getsockname()[1])
    )
    rate = 0.0
    if comm.rank == 0:
        with socket.create_connection(places[other]) as out:
            end = time.monotonic() + SOCKET_SECONDS
            while time.monotonic() < end:
                out.sendall(bytes(2**16))
    elif comm.rank == other:
        link, _ = listening.accept()
        got, start = 0, time.monotonic()
        while data := link.recv(2**20):
            got += len(data)
        rate = got / (time.monotonic() - start)
    listening.close()
    return max(comm.gather_objects(rate))


def measure(comm: Any, route: str, wire: str, n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time and check one route with one wire format; `torus+pipeline` has the pipeline among peers.

    **Ranks:** all. **Raises:** PlanError where it cannot be carried out.
    """
    import tensorflow as tf

    import tfcommx as cx
    from tfcommx import routes
    from tfcommx.planner.check import check_scheme
    from tfcommx.planner.plan import Gradient, make_plan
    from tfcommx.runtime.executor import PlanExecutor

    name, _, among_peers = route.partition("+")
    sparse = routes.get(name).sparse
    how = {"selection": args.selection, "density": args.density} if sparse else {}
    scheme = cx.Scheme(
        route=name, wire=wire, dense_below=0, peer_route=among_peers or "allreduce", **how
    )
    check_scheme(scheme, comm.topology, comm.has_messages)
    plan = make_plan(
        [Gradient("gradient", (n, 1), "float32")],
        {"*": scheme},
        comm.topology,
        "sum",
        args.links,
    )
    (bucket,) = plan.buckets
    executor = PlanExecutor(plan, comm)
    step = tf.function(
        lambda tensor: executor.exchange({"gradient": tensor})["gradient"], autograph=False
    )
    mine = tf.constant(gradient(comm.rank, n)[:, None])
    seconds, arrived, before = [], 0.0, comm.traffic()
    for number in range(args.steps + WARM_UP):
        comm.gather_objects("ready")
        start = time.monotonic()
        result = step(mine)
        took = time.monotonic() - start  # an eager call returns when its result is there
        arrived += weighted_sum(result.numpy()[:, 0])
        seconds += [max(comm.gather_objects(took))] if number >= WARM_UP else []
    steps = args.steps + WARM_UP
    residuals = executor.state().residuals_by_variable()
    rows = comm.gather_objects(
        (
            arrived,
            sum(map(weighted_sum, residuals.values())),
            weighted_sum(mine.numpy()[:, 0]),
            (comm.traffic().between - before.between) / steps,
        )
    )
    promised = routes.get(name).wire_bytes(bucket, comm.topology).between
    verified = (
        len({row[0] for row in rows}) == 1
        and rows[0][0] + sum(row[1] for row in rows) == steps * sum(row[2] for row in rows)
        and abs(statistics.mean(row[3] for row in rows) - promised) <= 1e-6 * promised
    )
    found = {
        "route": route,
        "wire": wire,
        "nodes": comm.topology.nodes,
        "slots": comm.topology.slots,
        "rate_mbit": args.rate_mbit,
        "n": n,
        "density": args.density if sparse else 1.0,
        "seconds": statistics.median(seconds),
        "wire_bytes": promised,
        "limit_seconds": routes.get(name).port_bytes(bucket, comm.topology) / args.socket_rate,
        "verified": verified,
    }
    if args.probe:
        found["predicted_seconds"] = routes.get(name).seconds(bucket, comm.topology, args.links)
    return found


def work(args: argparse.Namespace) -> None:
    """Measure all that was asked for; rank 0 writes one line of JSON per result as it comes."""
    import tfcommx as cx
    from tfcommx.measure.links import probe
    from tfcommx.routes import ROUTES, get
    from tfcommx.terms import NOMINAL, PlanError

    # nodes of a virtual cluster share one machine, which may be slow
    comm = cx.init(node_size=args.node_size, watch_seconds=120)
    args.socket_rate = socket_rate(comm)
    args.links = (
        probe(comm, PROBED, repeats=3, blocks=[NOMINAL.block_bytes]).links
        if args.probe
        else NOMINAL
    )
    args.rate_mbit = args.rate_mbit or round(args.socket_rate * 8e-6, 1)
    for n in args.sizes:
        for route in args.routes or [*ROUTES, "torus+pipeline"]:
            for wire in [
                wire
                for wire in get(route.partition("+")[0]).wires
                if not args.wires or wire in args.wires
            ]:
                try:
                    found = measure(comm, route, wire, n, args)
                except PlanError as refusal:
                    if comm.rank == 0:
                        print(f"{route} {wire}: left out: {refusal}", flush=True)
                    continue
                if comm.rank == 0:
                    with open(args.json, "a") as file:
                        file.write(json.dumps(found) + "\n")


# --- around them ------------------------------------------------------------------------


def launch(args: argparse.Namespace, json_file: Path) -> int:
    """Run this script on the ranks of the hosts, of the cluster that is up, or of one that is made
    for it.
    """
    ranks = (
        sum(int(host.rpartition(":")[2]) for host in args.hosts.split(","))
        if args.hosts
        else args.nodes * args.slots
    )
    command = [
        "horovodrun",
        "-np",
        str(ranks),
        f"--{args.launcher}",
        sys.executable,
        __file__,
        "--worker",
        "--json",
        str(json_file),
        "--density",
        str(args.density),
        "--selection",
        args.selection,
        "--steps",
        str(args.steps),
        "--sizes",
        *map(str, args.sizes),
        *(["--routes", *args.routes] if args.routes else []),
        *(["--wires", *args.wires] if args.wires else []),
        *(["--probe"] if args.probe else []),
        *(["--node-size", str(args.node_size)] if args.node_size else []),
    ]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    if args.hosts:
        return subprocess.run(
            [*command[:3], "-H", args.hosts, *command[3:]], env=environment
        ).returncode
    cluster = [str(ROOT / "scripts" / "cluster"), "--name", args.cluster or f"b{os.getpid()}"]
    try:
        if not args.cluster:
            subprocess.run(
                [
                    *cluster,
                    "up",
                    "--nodes",
                    str(args.nodes),
                    "--slots",
                    str(args.slots),
                    "--rate",
                    args.rate,
                ],
                check=True,
            )
        mbit = json.loads(Path(f"/run/tfcommx-{cluster[-1]}/state.json").read_text())["rate_mbit"]
        return subprocess.run(
            [*cluster, "run", "--", *command, "--rate-mbit", str(mbit)], env=environment
        ).returncode
    except subprocess.CalledProcessError as error:
        return error.returncode  # scripts/cluster has said why
    finally:
        if not args.cluster:
            subprocess.run([*cluster, "down"], stdout=subprocess.DEVNULL)


def show(rows: list[dict[str, Any]], png: str | None) -> None:
    """Print the table; draw it."""
    print(
        f"{'route':<14}{'wire':<16}{'n':>12}{'density':>9}{'seconds':>10}"
        f"{'limit':>9}{'x limit':>9}{'x allreduce':>13}"
        f"{'MB sent':>10}  verified"
    )
    horovod = {row["n"]: row["seconds"] for row in rows if row["route"] == "allreduce"}
    for row in rows:
        faster = f"{horovod[row['n']] / row['seconds']:.2f}" if row["n"] in horovod else "-"
        print(
            f"{row['route']:<14}{row['wire']:<16}{row['n']:>12,}{row['density']:>9g}"
            f"{row['seconds']:>10.3f}{row['limit_seconds']:>9.3f}"
            f"{row['seconds'] / row['limit_seconds']:>9.2f}{faster:>13}"
            f"{row['wire_bytes'] / 1e6:>10.2f} "
            f" {row['verified']}"
        )
    if png and rows:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        names = [
            f"{row['route']} {row['wire']}, n = {row['n']:,}, density {row['density']:g}"
            for row in rows
        ]
        figure, axes = plt.subplots(figsize=(9, 1.2 + 0.35 * len(rows)), layout="constrained")
        axes.barh(
            names, [row["seconds"] for row in rows], color="tab:blue", label="measured (median)"
        )
        axes.plot(
            [row["limit_seconds"] for row in rows],
            names,
            "k|",
            markersize=14,
            label="limit of the link",
        )
        axes.invert_yaxis()
        axes.set(
            xscale="log",
            xlabel="seconds per exchange",
            title=f"{rows[0]['nodes']} nodes x {rows[0]['slots']} slots, "
            f"{rows[0]['rate_mbit']:g} Mbit/s",
        )
        axes.legend()
        figure.savefig(png, dpi=120)


def draw_predicted(rows: list[dict[str, Any]], png: str) -> None:
    """Draw the seconds of each route over n, a panel for each number of nodes: measured beside
    predicted.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(FIGURE["nodes"]), figsize=(12, 4.2), sharey=True, layout="constrained"
    )
    for panel, nodes in zip(panels, FIGURE["nodes"], strict=True):
        for route, colour in zip(
            FIGURE["routes"], ("tab:blue", "tab:orange", "tab:green"), strict=True
        ):
            mine = [row for row in rows if (row["nodes"], row["route"]) == (nodes, route)]
            sizes = [row["n"] for row in mine]
            panel.plot(
                sizes,
                [row["seconds"] for row in mine],
                "o",
                color=colour,
                label=f"{route}, measured",
            )
            panel.plot(
                sizes, [row["predicted_seconds"] for row in mine], color=colour, label="predicted"
            )
        panel.set(
            xscale="log",
            yscale="log",
            xlabel="entries, float32",
            title=f"{nodes} nodes x 1 slot, {rows[0]['rate_mbit']:g} Mbit/s",
        )
        panel.set_xticks(FIGURE["sizes"], [f"{n:,}" for n in FIGURE["sizes"]], minor=False)
        panel.set_xticks([], minor=True)
    panels[0].set_ylabel("seconds per allreduce")
    panels[0].legend()
    figure.savefig(png, dpi=110)


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Measure on one cluster; return the results and the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        status = launch(args, found)
        text = found.read_text() if found.exists() else ""
    if args.json and text:
        with open(args.json, "a") as file:
            file.write(text)
    return [json.loads(line) for line in text.splitlines()], status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--slots", type=int, default=2, help="ranks per node")
    parser.add_argument("--rate", default="200mbit", help="of each node's link, each way")
    parser.add_argument("--cluster", help="name of a virtual cluster that is up; default: make one")
    parser.add_argument("--hosts", help="real hosts, as for horovodrun -H")
    parser.add_argument(
        "--node-size", type=int, help="ranks that stand for a node, where --hosts has only one"
    )
    parser.add_argument("--launcher", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1_000_000], help="entries of the gradient"
    )
    parser.add_argument("--density", type=float, default=0.01, help="of sparse routes")
    parser.add_argument("--selection", default="mstopk", help="of sparse routes")
    parser.add_argument("--routes", nargs="+", help="default: all")
    parser.add_argument("--wires", nargs="+", help="formats; default: all that a route writes")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--json", help="append one object a line to this file")
    parser.add_argument("--png", help="draw the table into this file")
    parser.add_argument(
        "--figure",
        metavar="PNG",
        help="draw routes of messages over 2, 4 and 8 nodes, beside what they should cost",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="measure the links first, plan with them, and say what they predict",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rate-mbit", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    if args.figure:
        args.slots, args.launcher, args.sizes, args.routes, args.probe = (
            1,
            "mpi",
            FIGURE["sizes"],
            FIGURE["routes"],
            True,
        )
    rows, status = [], 0
    for nodes in FIGURE["nodes"] if args.figure else [args.nodes]:
        found, ended = run(argparse.Namespace(**{**vars(args), "nodes": nodes}))
        rows, status = rows + found, status or ended
        if found:
            show(found, args.png)
    if args.figure and not status:
        draw_predicted(rows, args.figure)
    return status or int(not rows or not all(row["verified"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
