"""Lets a rank begin in a process that has loaded TensorFlow: tests/warm_ranks.py says why.

`begin` is called where Python starts (sitecustomize.py). It passes on the identity of this process:
its arguments, environment, folder, files, processors. The other process forks, and the new process
runs the program. This one waits, passes signals on, and ends as the program ends, so the launcher
that has started it sees no difference. A program that it cannot pass on runs here, as usual.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

SOCKETS = "TFCOMMX_TEST_WARM"  # A folder with the servers' sockets, 0 and 1
RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK")
ALONE = "TFCOMMX_TEST_WARM_ALONE"  # A program that is no rank begins so, too
ACCOUNT = "TFCOMMX_TEST_WARM_FOR"  # The process whose tests use the CPU seconds of the program
# Prefixes of the variables that TensorFlow, its libraries and Python read while they are loaded
EARLY = ("TF_", "XLA_", "KERAS_", "OMP_", "OPENBLAS_", "MKL_", "MALLOC_", "PYTHON")
# Those of them that `become` sets up, or that are read when a program asks for its cluster
LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING", "TF_CONFIG"}
PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def surroundings() -> dict[str, str]:
    """Return the variables and namespaces that must equal those where TensorFlow was loaded."""
    names = {name for name in os.environ if name.startswith(EARLY)} - LATER
    found = {space: os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "user")}
    return found | {name: os.environ[name] for name in names}


def begin() -> None:
    """Run the program in a process that has loaded TensorFlow, if there is one; then end."""
    folder, words = os.environ.get(SOCKETS), sys.orig_argv[1:]
    ranks = [os.environ[name] for name in (*RANKS, ALONE) if name in os.environ]
    # Python's own options are not handed over
    if (
        not folder
        or not ranks
        or not words
        or (words[0][:1] == "-" and words[0] not in ("-m", "-c"))
    ):
        return
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(f"{folder}/{int(ranks[0]) % 2}")
    except OSError:
        return
    deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    told = {
        "words": words,
        "surroundings": surroundings(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "pid": os.getpid(),
        "processors": sorted(os.sched_getaffinity(0)),
        "deaf": deaf,
    }
    passed_on = PASSED_ON - ({signal.SIGINT} if deaf else set())
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    text = json.dumps(told).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(text)
    with server.makefile("r") as answers:
        if pid := int(answers.readline()):
            for number in passed_on:
                signal.signal(number, lambda which, _: pass_on(pid, which))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        if not pid:  # The surroundings differ
            return
        # Without an answer the server has been killed, and its forks end
        status = os.waitstatus_to_exitcode(int(answers.readline() or signal.SIGKILL))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # It has just ended
        os.kill(pid, number)
