"""Claim: if the network between nodes is slow, the routes for slow networks beat an allreduce.

    python scripts/bench routes --nodes 4 --slots 2 --rate 200mbit --sizes 25000000 --probe
    python scripts/bench routes --sizes 1000000 --launcher mpi        # quick; MPI, not Gloo
    python scripts/bench routes --hosts a:8,b:8 --sizes 25000000      # real machines, no root
    python scripts/bench routes --nodes 2 4 8 --slots 1 --launcher mpi --probe \\
        --sizes 250000 1000000 4000000 --routes pipeline tree bidirectional --png routes.png

Peers: Horovod's allreduce is `allreduce plain`, with its own fp16 compression `allreduce float16`.
By default on a virtual cluster of 4 nodes of 2, which needs root and iproute2. One gradient of n
float32 is exchanged as in training, in a compiled step; a row's name is the route and the wire
format. `seconds` is the median over the steps of the slowest rank's time. `wire_bytes` counts the
bytes that a rank sends to other nodes, as the mean over the ranks. `limit_seconds` is the route's
own: the bytes through its busiest port, in the busier direction, over the rate of a plain socket
between two nodes in the same run. `verified`: every entry of the gradients has arrived or is in a
residual, on all ranks alike, and the bytes counted in the exchange are those that the route
promises. `torus+pipeline` is the torus with the pipeline among peers. With --probe and several
numbers of nodes the picture shows the predicted time of each route beside the measured one.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from bench import options, ranks, rounds
from bench.checks import gradient, weighted_sum

import tfcommx as cx
from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.core import (
    DENSE_CODES,
    NOMINAL,
    PLAIN,
    ConfigurationError,
    Links,
    Plan,
    Scheme,
    replacing,
)
from tfcommx.launch.launcher import launch_interfaces
from tfcommx.measure.links import probe
from tfcommx.planner.check import check_scheme
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.watch import liveness

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
# Bytes of a message
PROBED = (2**10, 2**12, 2**22, 2**24)
# Steps that are not counted: the first is traced, both touch their memory for the first time.
WARM_UP = 2
SOCKET_SECONDS = 2.0  # how long the plain socket is measured


@dataclasses.dataclass(frozen=True)
class Network:
    """The measured network, by which routes are judged and predicted."""

    # Bytes per second of a plain socket between two nodes.
    socket_rate: float
    # Planned with: measured if --probe is given, else nominal.
    links: Links
    # Rate of each node's link, as set up; for real hosts the plain socket's.
    rate_mbit: float


def socket_rate(comm: Comm) -> float:
    """Measure the bytes per second of a plain socket from rank 0 to the next node's first rank.

    **Ranks:** all.
    """
    other = comm.topology.slots
    if comm.topology.nodes == 1:
        raise SystemExit(
            "At least two nodes are required: the limit is that of the link between nodes."
        )
    listening = socket.create_server(("", 0))
    addresses = comm.gather_objects(
        (liveness.addresses(launch_interfaces())[0], listening.getsockname()[1])
    )
    rate = 0.0
    if comm.rank == 0:
        with socket.create_connection(addresses[other]) as out:
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


def measure_network(comm: Comm, chosen: argparse.Namespace) -> Network:
    """Measure the socket rate and the links, which give the routes' limits. **Ranks:** all."""
    rate = socket_rate(comm)
    links = NOMINAL
    if chosen.probe:
        links = probe(comm, PROBED, repeats=3, blocks=[NOMINAL.block_bytes]).links
    return Network(rate, links, chosen.rate_mbit or round(rate * 8e-6, 1))


def planned(comm: Comm, scheme: Scheme, n: int, links: Links) -> Plan:
    """Plan the exchange of one gradient.

    **Raises:** ConfigurationError if it cannot be carried out.
    """
    check_scheme(scheme, comm.topology, comm.messages.possible)
    return make_plan(
        [Gradient("gradient", (n, 1), "float32")], {"*": scheme}, comm.topology, "sum", links
    )


def exchange(comm: Comm, plan: Plan, n: int, repeats: int) -> tuple[list[float], float, bool]:
    """Exchange the gradients some times, after a warm-up.

    Returns:
        The seconds of each timed step, of the slowest rank; the mean bytes that a rank sent to
        other nodes in a step, as counted; whether every entry has arrived or is in a residual.

    **Ranks:** all.
    """
    executor = PlanExecutor(plan, comm)
    step = tf.function(
        lambda tensor: executor.exchange({"gradient": tensor})["gradient"], autograph=False
    )
    mine = tf.constant(gradient(comm.rank, n)[:, None])
    seconds, arrived, before = [], 0.0, comm.traffic()
    steps, results = repeats + WARM_UP, [None]
    for _ in range(steps):

        def call() -> None:
            results[0] = step(mine)  # an eager call returns when its result is computed

        seconds.append(rounds.seconds_of(call, comm))
        arrived += weighted_sum(results[0].numpy()[:, 0])
    residuals = executor.export().residuals
    everyone = comm.gather_objects(
        (
            arrived,
            sum(map(weighted_sum, residuals.values())),
            weighted_sum(mine.numpy()[:, 0]),
            weighted_sum(abs(mine.numpy()[:, 0])),
            (comm.traffic().between - before.between) / steps,
        )
    )
    sums, kept, given, sizes, sent = zip(*everyone, strict=True)
    # Codes and their residuals add up to the gradient within float32 rounding. The tolerance is
    # smaller than a typical entry, so a lost entry exceeds it.
    allowed = 1e-8 * steps * sum(sizes) if plan.buckets[0].wire in DENSE_CODES else 0.0
    lost = abs(sums[0] + sum(kept) - steps * sum(given))
    complete = len(set(sums)) == 1 and lost <= allowed
    return seconds[WARM_UP:], statistics.mean(sent), complete


def row_of(
    comm: Comm, name: tuple[str, str], n: int, network: Network, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Time and check one route with one wire format; return its row.

    Args:
        name: route and wire format; `torus+pipeline` is the torus with the pipeline among peers.
        n: entries of the gradient.

    **Ranks:** all. **Raises:** ConfigurationError if it cannot be carried out.
    """
    full_name, wire = name
    route_name, _, among_peers = full_name.partition("+")
    route = routes.get(route_name)
    is_sparse = route_name in routes.SPARSE
    density = chosen.density if is_sparse else 1.0
    how = {"selection": chosen.selection, "density": density} if is_sparse else {}
    scheme = cx.Scheme(
        route=route_name, wire=wire, dense_below=0, peer_route=among_peers or "allreduce", **how
    )
    plan = planned(comm, scheme, n, network.links)
    (bucket,) = plan.buckets
    seconds, sent, complete = exchange(comm, plan, n, chosen.repeats)
    promised = route.wire_bytes(bucket, comm.topology).between
    predicted = {}
    if chosen.probe:
        predicted["predicted_seconds"] = route.seconds(bucket, comm.topology, network.links)
    return options.row(
        f"{full_name} {wire}",
        n,
        seconds,
        complete and abs(sent - promised) <= 1e-6 * promised,
        density,
        route.port_bytes(bucket, comm.topology) / network.socket_rate,
        route=full_name,
        wire=wire,
        nodes=comm.topology.nodes,
        slots=comm.topology.slots,
        rate_mbit=network.rate_mbit,
        wire_bytes=promised,
        **predicted,
    )


def names(chosen: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the routes that were asked for, each with its wire formats."""
    for route in chosen.routes or [*routes.ROUTES, "torus+pipeline"]:
        for wire in routes.get(route.partition("+")[0]).wires:
            # Below 32 bits the torus ignores `peer_route` and chooses the sum among peers itself
            if (not chosen.wires or wire in chosen.wires) and ("+" not in route or wire == PLAIN):
                yield route, wire


def parser() -> argparse.ArgumentParser:
    found = options.parser(
        __doc__, sizes=[1_000_000], repeats=3, meaning_of_sizes="entries of the gradient"
    )
    found.add_argument("--density", type=float, default=0.01, help="of sparse routes")
    found.add_argument("--selection", default="mstopk", help="of sparse routes")
    found.add_argument("--routes", nargs="+", help="default: all")
    found.add_argument("--wires", nargs="+", help="formats; default: all that a route writes")
    found.add_argument(
        "--probe",
        action="store_true",
        help="measure the links first, plan with them, and print the times that they predict",
    )
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time all that was asked for. **Ranks:** all."""
    comm = ranks.join(chosen)
    network = measure_network(comm, chosen)
    for n in chosen.sizes:
        rows, refused = [], []
        for name in names(chosen):
            try:
                rows.append(row_of(comm, name, n, network, chosen))
            except ConfigurationError as refusal:
                refused.append(f"{' '.join(name)}: left out: {refusal}")
        if not rows:
            unwritten = f"A wire format that a route writes is required. Received {chosen.wires}."
            raise SystemExit("\n".join(refused) or unwritten)
        yield table(rows, refused)


def table(rows: list[dict[str, Any]], notes: list[str]) -> options.Table:
    """Make the table of one size."""
    plain = [one for one in rows if (one["route"], one["wire"]) == ("allreduce", "plain")]
    own = {"MB sent": lambda one: f"{one['wire_bytes'] / 1e6:.2f}"}
    if plain:
        base = plain[0]["seconds"]
        own = {"x allreduce": lambda one: f"{base / one['seconds']:.2f}"} | own
    if "predicted_seconds" in rows[0]:
        own["predicted, ms"] = lambda one: f"{one['predicted_seconds'] * 1e3:.2f}"
    one = rows[0]
    title = f"{one['nodes']} nodes of {one['slots']} slots, {one['rate_mbit']:g} Mbit/s"
    return options.Table(title, rows, own=own, notes=notes)


def draw(rows: list[dict[str, Any]], png: Path) -> None:
    """Draw the seconds of each route over n, a panel for each of several numbers of nodes."""
    clusters = sorted({row["nodes"] for row in rows})
    names = list(dict.fromkeys(row["route"] for row in rows))
    if len(clusters) == 1 or "predicted_seconds" not in rows[0]:
        return options.save_picture(rows, png)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = figure.subplots(1, len(clusters), sharey=True)
    for panel, nodes in zip(panels, clusters, strict=True):
        for route, colour in zip(names, COLOURS, strict=False):
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
            title=f"{nodes} nodes x {rows[0]['slots']} slot, {rows[0]['rate_mbit']:g} Mbit/s",
        )
        panel.set_xticks(sizes, [f"{n:,}" for n in sizes], minor=False)
        panel.set_xticks([], minor=True)
    panels[0].set_ylabel("seconds per allreduce")
    panels[0].legend()
    with replacing(png) as part:
        figure.savefig(part, dpi=110)
