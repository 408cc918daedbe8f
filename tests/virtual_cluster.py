"""Three nodes of scripts/cluster for tests: node0 starts and submits, node1 and node2 compute."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launching import QUICK, ROOT, Ended

SCRIPT = str(ROOT / "scripts" / "cluster")
COMPUTE = ("node1", "node2")
# Environment of commands, as a user's, except for `QUICK`
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": QUICK,
}


def why_not() -> str:
    """Return the reason why there can be no cluster here; empty if there can."""
    # Root first, because `tc` is not on the PATH of other users of Debian
    if os.geteuid() != 0:
        return "a virtual cluster needs root"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if not shutil.which(tool)]
    if missing:
        return f"a virtual cluster needs {', '.join(missing)}"
    refused = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no network namespaces here: {refused.stderr.strip()}" if refused.returncode else ""


REASON = why_not()
needs_cluster = pytest.mark.skipif(bool(REASON), reason=REASON)


def wait_until(true: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition is true; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.2)


class Nodes:
    """The nodes, and commands on them.

    Args:
        word: beginning of the cluster's name, up to 5 letters. This process's number follows,
            because several test runs may share a machine.
        environment: variables of the commands besides this process's.
    """

    def __init__(self, word: str, **environment: str) -> None:
        self.name = name = f"{word}{os.getpid()}"
        self.environment = {
            **os.environ,
            # The first has the cluster's ssh
            "PATH": f"/run/tfcommx-{name}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            # Only root can make the nodes
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **environment,
        }

    def do(self, *words: object) -> str:
        """Carry out a verb of scripts/cluster."""
        command = [SCRIPT, "--name", self.name, *map(str, words)]
        done = subprocess.run(command, text=True, capture_output=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def up(self) -> None:
        # A process of this number may have been killed before it could clean up
        self.down()
        self.do("up", "--nodes", 1 + len(COMPUTE), "--slots", 2, "--rate", "500mbit")

    def down(self) -> None:
        self.do("down")

    def start(
        self, node: int, command: list[str], log: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on a node; its output is appended to `log`."""
        with log.open("ab") as out:
            return subprocess.Popen(
                [SCRIPT, "--name", self.name, "run", "--node", str(node), "--", *command],
                cwd=ROOT,
                env=self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(
        self, command: list[str], log: Path, seconds: float, node: int = 0, **environment: str
    ) -> Ended:
        """Run a command on a node to its end."""
        start = time.monotonic()
        process = self.start(node, command, log, **environment)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            end(process)
        return Ended(process.returncode, log.read_text(), time.monotonic() - start)

    def ranks(self) -> list[psutil.Process]:
        """Return Python's processes on the compute nodes: ranks, and their watchers."""
        found = []
        for node in range(1, 1 + len(COMPUTE)):
            space = f"tfcommx-{self.name}-{node}"
            pids = subprocess.run(["ip", "netns", "pids", space], text=True, capture_output=True)
            for pid in map(int, pids.stdout.split()):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if "python" in process.name():
                        found.append(process)
        return found

    def end_ranks(self) -> None:
        """Kill the ranks that a test has left running."""
        for process in self.ranks():
            with contextlib.suppress(psutil.Error):
                process.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that `start` made, with those that it started on this machine."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
