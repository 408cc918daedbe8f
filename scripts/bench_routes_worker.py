"""What scripts/bench_routes.py runs on every rank: times each route, and checks its answers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any

# Before NumPy: the threads that check one step would go on spinning during the next one.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import tfcommx.cli.quiet_start

# isort: split
import benchmark_options
import tensorflow as tf
from bench_routes import options
from verify_sums import gradient, weighted_sum

import tfcommx as cx
from tfcommx import routes
from tfcommx.comm import liveness
from tfcommx.comm.base import Comm
from tfcommx.comm.launcher import launch_interfaces
from tfcommx.measure.links import probe
from tfcommx.planner.check import check_scheme
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.terms import NOMINAL, PLAIN, Links, Plan, PlanError, Scheme

# Bytes of a message; those between pass a virtual cluster's links in one burst, too soon.
PROBED = (2**10, 2**12, 2**22, 2**24)
# Steps that are not counted: the first is traced, both touch their memory for the first time.
WARM_UP = 2
SOCKET_SECONDS = 2.0  # how long the plain socket is measured


@dataclasses.dataclass(frozen=True)
class Network:
    """What the routes are compared with."""

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
    """Measure what the routes are compared with. **Ranks:** all."""
    rate = socket_rate(comm)
    links = NOMINAL
    if chosen.probe:
        links = probe(comm, PROBED, repeats=3, blocks=[NOMINAL.block_bytes]).links
    return Network(rate, links, chosen.rate_mbit or round(rate * 8e-6, 1))


def planned(comm: Comm, scheme: Scheme, n: int, links: Links) -> Plan:
    """Plan the exchange of one gradient. **Raises:** PlanError if it cannot be carried out."""
    check_scheme(scheme, comm.topology, comm.has_messages)
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
    for number in range(repeats + WARM_UP):
        comm.gather_objects("ready")
        start = time.monotonic()
        result = step(mine)
        took = time.monotonic() - start  # an eager call returns when its result is there
        arrived += weighted_sum(result.numpy()[:, 0])
        seconds += [max(comm.gather_objects(took))] if number >= WARM_UP else []
    steps = repeats + WARM_UP
    residuals = executor.state().residuals_by_variable()
    everyone = comm.gather_objects(
        (
            arrived,
            sum(map(weighted_sum, residuals.values())),
            weighted_sum(mine.numpy()[:, 0]),
            (comm.traffic().between - before.between) / steps,
        )
    )
    sums, kept, given, sent = zip(*everyone, strict=True)
    complete = len(set(sums)) == 1 and sums[0] + sum(kept) == steps * sum(given)
    return seconds, statistics.mean(sent), complete


def measure(
    comm: Comm, name: tuple[str, str], n: int, network: Network, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Time and check one route with one wire format; return its row.

    Args:
        name: route and wire format; `torus+pipeline` is the torus with the pipeline among peers.
        n: entries of the gradient.

    **Ranks:** all. **Raises:** PlanError if it cannot be carried out.
    """
    full_name, wire = name
    route_name, _, among_peers = full_name.partition("+")
    route = routes.get(route_name)
    density = chosen.density if route.sparse else 1.0
    how = {"selection": chosen.selection, "density": density} if route.sparse else {}
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
    return benchmark_options.row(
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
            # Among peers 16 bits have a way of their own
            if (not chosen.wires or wire in chosen.wires) and ("+" not in route or wire == PLAIN):
                yield route, wire


def main() -> None:
    """Measure all that was asked for; rank 0 writes one line of JSON per row as it comes."""
    chosen = options().parse_args()
    # Nodes of a virtual cluster share one machine, which may be slow.
    comm = cx.init(node_size=chosen.node_size, watch_seconds=120)
    network = measure_network(comm, chosen)
    for n in chosen.sizes:
        for name in names(chosen):
            try:
                found = measure(comm, name, n, network, chosen)
            except PlanError as refusal:
                if comm.rank == 0:
                    print(f"{' '.join(name)}: left out: {refusal}", flush=True)
                continue
            if comm.rank == 0:
                with chosen.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
