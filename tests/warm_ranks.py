"""Ranks that need not load TensorFlow: in `make test` they are forks of processes that have.

Loading it takes a rank 2 CPU seconds, which is longer than most tests. So the first launch starts
two servers (workers/site/warm_server.py); launchers start each rank as usual, and its program is
passed to one of them (workers/site/warm_start.py). The servers differ in Python's seed of string
hashes, and ranks 0 and 1 use different ones, so tests still notice an order that differs between
ranks. TensorFlow and a few other libraries are loaded before the fork, but not tfcommx and Horovod.
A fork does not free its objects when it ends (workers/site/warm_server.py). In `make test-all`
every rank loads all libraries itself, and ends as any process does.

The workers of xdist share the servers, which their controller starts.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).resolve().parent / "workers" / "site"
wanted = True  # conftest.py
shared = ""  # The folder of the controller's servers; conftest.py


def environment(alone: bool = False) -> dict[str, str]:
    """Return the variables, beside PYTHONPATH, with which a launch starts warm ranks.

    Args:
        alone: for a single program that starts warm itself, in place of a launch.
    """
    if not wanted:
        return {}
    variables = {
        "TFCOMMX_TEST_WARM": shared or servers().name,
        "TFCOMMX_TEST_WARM_FOR": str(os.getpid()),
    }
    return variables | ({"TFCOMMX_TEST_WARM_ALONE": "0"} if alone else {})


def cpu_seconds() -> float:
    """Return the CPU seconds of this process's ended warm ranks, which are no children of it."""
    if not shared and not servers.cache_info().currsize:
        return 0.0
    files = Path(shared or servers().name).glob(f"*-{os.getpid()}.cpu")
    return sum(float(file.read_text()) for file in files)


@functools.cache
def servers() -> tempfile.TemporaryDirectory[str]:
    """Start two servers that end with this process; return the folder with their sockets."""
    folder = tempfile.TemporaryDirectory(prefix="tfcommx_warm")
    lifeline, mine = os.pipe()
    started = []
    for number in (0, 1):
        with socket.socket(socket.AF_UNIX) as listening:  # Callers wait until it has loaded
            listening.bind(f"{folder.name}/{number}")
            listening.listen(64)
            given = (listening.fileno(), lifeline, f"{folder.name}/{number}")
            words = [sys.executable, "-c", f"import warm_server; warm_server.main(*{given!r})"]
            with open(f"{folder.name}/{number}.log", "w") as log:
                started.append(
                    subprocess.Popen(
                        words,
                        env={**os.environ, "PYTHONPATH": str(SITE), "PYTHONUNBUFFERED": "1"},
                        pass_fds=given[:2],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
    os.close(lifeline)

    def end() -> None:
        os.close(mine)
        for server in started:
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:  # A process that a test has left holds the other end
                server.kill()
                server.wait()
        folder.cleanup()

    atexit.register(end)
    return folder
