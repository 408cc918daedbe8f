"""Starts real ranks for tests, as a user does: with horovodrun (see workers/launcher.py)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import warm_ranks

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "tests" / "workers"  # programs that tests start
# As PYTHONPATH: programs start faster (workers/site/sitecustomize.py)
QUICK = f"{ROOT}:{WORKERS / 'site'}"
LAUNCHERS = {
    "gloo": ["--gloo"],
    # More processes than cores, and a rank that waits sleeps (sched_yield may starve others:
    # scripts/cluster)
    "mpi": [
        "--mpi",
        "--binding-args=--bind-to none --map-by slot:OVERSUBSCRIBE",
        "--mpi-args=--mca mpi_yield_when_idle 1 --mca threads_pthreads_yield_strategy nanosleep"
        " --mca threads_pthreads_nanosleep_time 20000",
    ],
}


class Ended(NamedTuple):
    status: int
    output: str
    seconds: float


def horovodrun(
    ranks: int,
    command: list[str],
    launcher: str = "gloo",
    seconds: float = 300,
    hosts: str | None = None,
    **environment: str,
) -> Ended:
    """Run a Python command (without `python`) on several ranks; end all if it takes too long."""
    # Horovod 0.28 starts a rank on every slot, whatever -np says
    where = ["-H", hosts or f"localhost:{ranks}"]
    words = [
        sys.executable,
        str(WORKERS / "launcher.py"),
        "-np",
        str(ranks),
        *where,
        *LAUNCHERS[launcher],
        sys.executable,
        *command,
    ]
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": QUICK,
        **warm_ranks.environment(),
        **environment,
    }
    start = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\n[killed after {seconds} s]"
    return Ended(process.returncode, output, time.monotonic() - start)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def what_failed(output: str) -> str:
    """Return the lines of all ranks that name a failure, then the end of the output."""
    lines = output.splitlines()
    named = [line for line in lines if re.search(r"FAILED|: ?E  |Error|tfcommx: ", line)]
    return "\n".join([*named[:60], "...", *lines[-40:]])


def run_tests(ranks: int, node_size: str, launcher: str, files: list[str], marks: str) -> None:
    """Run tests of tests/ranks on all ranks of a launch, which must all pass."""
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--color=no"]
    ended = horovodrun(
        ranks,
        ["-m", "pytest", *files, *options, "-o", f"addopts=-v -m '{marks}'"],
        launcher,
        seconds=1500,
        TFCOMMX_TEST_NODE_SIZE=node_size,
    )
    assert ended.status == 0, what_failed(ended.output)
    assert len(re.findall(r"=+ \d+ passed", ended.output)) == ranks, what_failed(ended.output)
