"""The time limit of MPI's start, which by itself waits without end for ranks that do not come.

    rank    a mark for its host's ranks -> MPI's start ............ -> end of the pipe
      |                                                                  |
    process beside it                      after the limit: no mark of rank 3; end the rank

A process, because MPI's start holds Python's lock. It knows only the standard library.
"""

from __future__ import annotations

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

# The folder of the launcher's daemon on this host, and the launch's name
FOLDER, LAUNCH = "PMIX_SERVER_TMPDIR", "PMIX_NAMESPACE"
# The launcher ends all ranks after the first: those on the host of a missing rank know its number
LATER_SECONDS = 5.0
PACKAGES = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def limited(rank: int, local_rank: int, size: int, seconds: float) -> Iterator[None]:
    """End this process, and say which ranks have not come, if MPI's start takes longer.

    Args:
        rank: of this process.
        local_rank: its number on its host; consecutive ranks are there.
        size: number of ranks.
        seconds: for the start, > 0.

    **Ranks:** local. **Cost:** a small process while MPI starts.
    """
    folder = os.environ.get(FOLDER, "")
    launch = re.sub(r"\W", "_", os.environ.get(LAUNCH, ""))
    here = range(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")))
    marks = {}
    if folder and launch:
        marks = {rank - local_rank + one: f"{folder}/tfcommx-{launch}-{one}" for one in here}
    try:
        Path(marks[rank]).touch()
    except (KeyError, OSError):  # Another launcher: it can be limited, but not told
        marks = {}
    job = {"pid": os.getpid(), "size": size, "seconds": seconds, "marks": marks}
    # Without the user's environment and packages, which may do anything at the start
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGES)!r}); "
        "from tfcommx.launch.mpi_start import main; main()"
    )
    words = [sys.executable, "-I", "-S", "-c", program, json.dumps(job)]
    beside = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        if beside.stdin is not None:
            beside.stdin.close()
        beside.kill()  # Another thread's child may hold the pipe open
        beside.wait()


def main() -> None:
    """Wait until the rank has started, or is gone; end it after the limit."""
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
    """Tell whether the rank closes the pipe within this time."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])
