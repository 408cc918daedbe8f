"""Runs a benchmark's worker on the ranks of a virtual cluster, of real hosts, or of this one."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the ranks are."""
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--slots", type=int, default=2, help="ranks per node")
    parser.add_argument("--cluster", help="name of a virtual cluster that is up; default: make one")
    parser.add_argument("--hosts", help="real hosts, as for horovodrun -H")
    parser.add_argument(
        "--node-size", type=int, help="ranks that stand for a node, if --hosts has only one"
    )
    parser.add_argument("--launcher", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--rate-mbit", type=float, help=argparse.SUPPRESS)


def launch(worker: list[str], chosen: argparse.Namespace) -> int:
    """Run a worker on the hosts, on the cluster that is up, or on one that is made for it.

    Args:
        worker: its command. On a virtual cluster it gets `--rate-mbit` of the links besides.
        chosen: the options of `add_options`, and `rate` for a cluster that is to be made.

    Returns:
        The exit status.
    """
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    words = [*_horovodrun(chosen), *worker]
    if chosen.hosts:
        return subprocess.run(words, env=environment).returncode
    name = chosen.cluster or f"b{os.getpid()}"
    cluster = [str(ROOT / "scripts" / "cluster"), "--name", name]
    size = ["--nodes", str(chosen.nodes), "--slots", str(chosen.slots), "--rate", chosen.rate]
    # By default the process would end at once, and leave the cluster that it has made, with ranks
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if not chosen.cluster:
            subprocess.run([*cluster, "up", *size], check=True)
        state = json.loads(Path(f"/run/tfcommx-{name}/state.json").read_text())
        words = [*words, "--rate-mbit", str(state["rate_mbit"])]
        return subprocess.run([*cluster, "run", "--", *words], env=environment).returncode
    except subprocess.CalledProcessError as error:
        return error.returncode  # scripts/cluster has said why
    finally:
        if not chosen.cluster:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A half would be left
            subprocess.run([*cluster, "down"], stdout=subprocess.DEVNULL)
        signal.signal(signal.SIGTERM, before)


def _horovodrun(chosen: argparse.Namespace) -> list[str]:
    ranks, hosts = chosen.nodes * chosen.slots, []
    if chosen.hosts:
        ranks = sum(int(host.rpartition(":")[2]) for host in chosen.hosts.split(","))
        hosts = ["-H", chosen.hosts]
    return ["horovodrun", "-np", str(ranks), *hosts, f"--{chosen.launcher}"]
