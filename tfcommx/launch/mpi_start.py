"""Limit the time of MPI's start, because it would wait without end for missing ranks.

    rank    a mark for its host's ranks -> MPI's start ............ -> end of the pipe
      |                                                                  |
    watching process                       after the limit: no mark of rank 3; end the rank

It is a process, because MPI's start holds Python's lock. It imports only the standard library.
"""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfcommx.launch.interpreter import isolated

# The folder of the launcher's daemon on this host, and the launch's name
FOLDER, LAUNCH = "PMIX_SERVER_TMPDIR", "PMIX_NAMESPACE"
# Extra seconds of ranks that see no missing rank, because the launcher ends all ranks after the
# first, and the ranks on the host of a missing rank can name it
LATER_SECONDS = 5.0


@contextlib.contextmanager
def limited(rank: int, local_rank: int, size: int, seconds: float) -> Iterator[None]:
    """End this process, and name the missing ranks, if MPI's start takes longer.

    Args:
        local_rank: its number on its host, whose ranks are consecutive.
        seconds: time limit of the start, > 0.

    **Ranks:** local. **Cost:** a small process while MPI starts.
    """
    folder = os.environ.get(FOLDER, "")
    launch = re.sub(r"\W", "_", os.environ.get(LAUNCH, ""))
    local_ranks = range(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")))
    marks = {}
    if folder and launch:
        marks = {
            rank - local_rank + number: f"{folder}/tfcommx-{launch}-{number}"
            for number in local_ranks
        }
    try:
        Path(marks[rank]).touch()
    except (KeyError, OSError):  # Another launcher: the time is limited, but no rank is named
        marks = {}
    job = {"pid": os.getpid(), "size": size, "seconds": seconds, "marks": marks}
    words = [*isolated("tfcommx.launch.mpi_start"), json.dumps(job)]
    # By the pipe's end the watcher learns that the rank has started, or is gone
    watcher = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        if watcher.stdin is not None:
            watcher.stdin.close()
        watcher.kill()  # Another thread's child may hold the pipe open
        watcher.wait()


def main() -> None:
    """Wait until the rank has started or ended; end it after the limit."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # It ends with its rank
    if _ended(job["seconds"]):
        return
    missing = [rank for rank, mark in job["marks"].items() if not Path(mark).exists()]
    if not missing and _ended(LATER_SECONDS):
        return
    ranks = f"Rank {', '.join(missing)}" if missing else "A rank on another host"
    sys.stderr.write(
        f"tfcommx: {ranks} of {job['size']} has not called init() on {socket.gethostname()} "
        f"within {job['seconds']:g} s, and MPI starts with all ranks only. Does every rank call "
        "tfcommx.init()? TFCOMMX_RENDEZVOUS_SECONDS changes the time.\n"
    )
    sys.stderr.flush()
    with contextlib.suppress(ProcessLookupError):
        os.kill(job["pid"], signal.SIGKILL)


def _ended(seconds: float) -> bool:
    """Return True if the rank closes the pipe within `seconds`."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])
