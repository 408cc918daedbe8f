"""Where the ranks of a benchmark are: on this host, on a virtual cluster, or on real hosts."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench import records, virtual_cluster
from bench.registry import Benchmark
from bench.virtual_cluster import SCRIPTS
from tfcommx.cli.environment import quiet_tensorflow
from tfcommx.launch.horovodrun import Launch, Running
from tfcommx.launch.hosts import Host, parse_hosts
from tfcommx.launch.launcher import launcher
from tfcommx.launch.rank_output import RankLines

END_SECONDS = 20  # for horovodrun to end its ranks
WATCH_SECONDS = 120  # nodes of a virtual cluster share one machine, which may be slow


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the ranks are."""
    place = parser.add_argument_group("where the ranks are")
    place.add_argument("--ranks", type=int, help="so many on this host")
    place.add_argument("--nodes", type=int, nargs="+", help="of a virtual cluster; several: each")
    place.add_argument("--slots", type=int, help="ranks of a node")
    place.add_argument(
        "--rate",
        "--rates",
        nargs="+",
        help="of a node's link, each way; several: each; none: all nodes on this host, no root",
    )
    place.add_argument("--cluster", help="name of a virtual cluster that is up; default: make one")
    place.add_argument("--hosts", help="real hosts, as for horovodrun -H")
    place.add_argument("--node-size", type=int, help="ranks that stand for a node")
    place.add_argument("--launcher", choices=["gloo", "mpi"])
    place.add_argument("--rate-mbit", type=float, help=argparse.SUPPRESS)


def in_launch() -> bool:
    """Return True if a launcher has started this process."""
    return launcher().kind != "none"


def is_chief() -> bool:
    """Return True if this process is rank 0, or alone."""
    return launcher().rank == 0


def join(chosen: argparse.Namespace) -> Any:
    """Start Horovod as the options say; return the Comm. **Ranks:** all."""
    import tfcommx as cx

    return cx.init(node_size=chosen.node_size, watch_seconds=WATCH_SECONDS)


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options that the launching process reads."""
    found = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    found.add_argument("--json", type=Path)
    found.add_argument("--png", type=Path)
    records.add_option(found)
    found.add_argument("--smoke", action="store_true")
    add_options(found)
    return found


class Cluster(NamedTuple):
    """A virtual cluster: one that is up, or one that is made of so many nodes and slots."""

    name: str | None
    nodes: int
    slots: int
    rate: str

    def hosts(self) -> tuple[Host, ...]:
        """Return the nodes by the names that `scripts/cluster` gives them."""
        return tuple(Host(f"node{node}", self.slots) for node in range(self.nodes))


@dataclass(frozen=True)
class Place:
    """Where a launch runs."""

    hosts: tuple[Host, ...]
    cluster: Cluster | None = None
    node_size: int | None = None
    launcher: str = "gloo"

    @property
    def size(self) -> int:
        return sum(host.slots for host in self.hosts)

    def note(self) -> str:
        """Return the note on this place for a record."""
        if self.cluster is None:
            names = sorted({host.name for host in self.hosts})
            if names == ["localhost"]:
                return "all ranks on this host, no links" if self.node_size else ""
            return f"hosts {', '.join(names)}"
        return (
            f"a virtual cluster: {self.cluster.nodes} nodes of {self.cluster.slots} as network "
            "namespaces of this machine, which share its cores; links of "
            f"{self.cluster.rate} each way (scripts/cluster)"
        )


@dataclass(frozen=True)
class LaunchThere(Launch):
    """A launch that another command starts, such as `scripts/cluster run --`."""

    before: tuple[str, ...] = ()

    def words(self) -> list[str]:
        return [*self.before, *super().words()]


def smoke_place(benchmark: Benchmark) -> Place:
    """Return where a benchmark's smallest run is: one launch for all that want the same."""
    hosts = (Host("localhost", max(1, benchmark.ranks)),)
    return Place(hosts, None, 1)


def places(chosen: argparse.Namespace, benchmark: Benchmark) -> list[Place]:
    """Return where a benchmark runs: one launch each.

    Args:
        chosen: the options of `add_options`; None where the user set none.
        benchmark: has the defaults.
    """
    engine = chosen.launcher or "gloo"
    size, slots = chosen.node_size, chosen.slots or benchmark.slots
    if chosen.hosts:
        return [Place(tuple(parse_hosts(chosen.hosts)), None, size, engine)]
    if chosen.cluster:
        if chosen.nodes or chosen.slots or chosen.rate:
            raise SystemExit(
                "--cluster names a cluster, which has nodes, slots and a rate. Omit --nodes, "
                "--slots and --rate."
            )
        state = virtual_cluster.state(chosen.cluster)
        cluster = Cluster(chosen.cluster, state["nodes"], state["slots"], state["rate"])
        return [Place(cluster.hosts(), cluster, size, engine)]
    on_nodes = chosen.nodes or chosen.rate
    if chosen.ranks or not (on_nodes or (benchmark.nodes and not chosen.smoke)):
        hosts = (Host("localhost", chosen.ranks or benchmark.ranks),)
        return [Place(hosts, None, size or (1 if chosen.smoke else None), engine)]
    found = []
    for nodes in chosen.nodes or [benchmark.nodes or 4]:
        for rate in chosen.rate or ["200mbit"]:
            if rate == "none":
                hosts = (Host("localhost", nodes * slots),)
                found.append(Place(hosts, None, size or slots, engine))
                continue
            cluster = Cluster(None, nodes, slots, rate)
            found.append(Place(cluster.hosts(), cluster, size, engine))
    return found


def launch(place: Place, words: list[str]) -> int:
    """Run the benchmarks' command on ranks; return the exit status.

    Args:
        place: where.
        words: after `python scripts/bench`. On a virtual cluster the ranks get `--rate-mbit` of
            its links besides.
    """
    quiet_tensorflow()
    paths = [str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = ":".join(filter(None, paths))
    # By default the process would end at once, and leave ranks, and the cluster that it has made
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _launch_on_cluster(place, words) if place.cluster else _run(place, words)
    finally:
        signal.signal(signal.SIGTERM, before)


def _launch_on_cluster(place: Place, words: list[str]) -> int:
    assert place.cluster is not None
    cluster = place.cluster
    with contextlib.ExitStack() as stack:
        name = cluster.name or stack.enter_context(
            virtual_cluster.made(cluster.nodes, cluster.slots, cluster.rate)
        )
        rate = ["--rate-mbit", str(virtual_cluster.state(name)["rate_mbit"])]
        return _run(place, [*words, *rate], tuple(virtual_cluster.command(name, "run", "--")))


def _run(place: Place, words: list[str], before: tuple[str, ...] = ()) -> int:
    """Run a launch to its end; end it if this process is to end."""
    if place.node_size:
        words = [*words, "--node-size", str(place.node_size)]
    command = (sys.executable, str(SCRIPTS / "bench"), *words)
    if place.size == 1:
        return subprocess.call(command)
    launch = LaunchThere(place.hosts, command, place.launcher, before=before)
    running, lines = Running(launch), RankLines()
    try:
        status = running.wait(lines)
        if status:
            print(running.failed(status, lines), file=sys.stderr)
        return status
    finally:
        if running.process.poll() is None:
            running.terminate()
            try:
                running.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                running.terminate()
