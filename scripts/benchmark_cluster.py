"""Runs a benchmark's worker on the ranks of a virtual cluster, of real hosts, or of this one."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tfcommx.cli.environment import quiet_tensorflow, without_start_up_messages

ROOT = Path(__file__).resolve().parent.parent
# For horovodrun to end its ranks
END_SECONDS = 20


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
    quiet_tensorflow()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    words = [*_horovodrun(chosen), *worker]
    # By default the process would end at once, and leave ranks, and the cluster that it has made
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if chosen.hosts:
            return _run(words, environment)
        return _launch_on_cluster(words, chosen, environment)
    finally:
        signal.signal(signal.SIGTERM, before)


def _launch_on_cluster(
    words: list[str], chosen: argparse.Namespace, environment: dict[str, str]
) -> int:
    name = chosen.cluster or f"b{os.getpid()}"
    cluster = [str(ROOT / "scripts" / "cluster"), "--name", name]
    size = ["--nodes", str(chosen.nodes), "--slots", str(chosen.slots), "--rate", chosen.rate]
    try:
        if not chosen.cluster:
            subprocess.run([*cluster, "up", *size], check=True)
        state = json.loads(Path(f"/run/tfcommx-{name}/state.json").read_text())
        words = [*words, "--rate-mbit", str(state["rate_mbit"])]
        return _run([*cluster, "run", "--", *words], environment)
    except subprocess.CalledProcessError as error:
        return error.returncode  # scripts/cluster has said why
    finally:
        if not chosen.cluster:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A half would be left
            subprocess.run([*cluster, "down"], stdout=subprocess.DEVNULL)


def _run(words: list[str], environment: dict[str, str]) -> int:
    """Run a launch to its end, without start-up messages; end it if this process is to end."""
    process = subprocess.Popen(
        words, env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        for line in process.stderr:
            sys.stderr.write(without_start_up_messages(line))
        return process.wait()
    finally:
        if process.poll() is None:
            # All of it: the shell that horovodrun starts mpirun by passes nothing on
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _horovodrun(chosen: argparse.Namespace) -> list[str]:
    ranks, hosts = chosen.nodes * chosen.slots, []
    if chosen.hosts:
        ranks = sum(int(host.rpartition(":")[2]) for host in chosen.hosts.split(","))
        hosts = ["-H", chosen.hosts]
    return ["horovodrun", "-np", str(ranks), *hosts, f"--{chosen.launcher}"]
