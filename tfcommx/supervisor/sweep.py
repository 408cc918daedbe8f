"""End what is left of a run's processes on this host, and remove its memory files.

    python -I -S sweep.py RUN GENERATION ranks     ranks of that generation, without the launcher
    python -I -S sweep.py RUN GENERATION           all processes of that generation
    python -I -S sweep.py RUN                      all processes of the run, and its memory files

They are found by the environment that the supervisor has given them. A process of the run that
shall outlive a generation has no TFCOMMX_GENERATION in its environment. Knows only the standard
library: the supervisor calls it over ssh, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

RUN, GENERATION = "TFCOMMX_RUN", "TFCOMMX_GENERATION"
# What horovodrun and mpirun give to ranks
RANK = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=")
MEMORY = Path("/dev/shm")
# Without a change, and without a process: nobody comes back to it
STALE_SECONDS = 3600.0
# For the kernel to end processes that were killed
END_SECONDS = 5.0


def find_processes(run: str, generation: str | None = None, ranks: str = "") -> list[int]:
    """Return this user's processes of a run, or of one of its generations, or that one's ranks."""
    wanted = {f"{RUN}={run}".encode()}
    if generation is not None:
        wanted.add(f"{GENERATION}={generation}".encode())
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        # It may have ended meanwhile, or be another user's
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            is_rank = any(variable.startswith(RANK) for variable in variables)
            if wanted <= set(variables) and pid != os.getpid() and (is_rank or not ranks):
                found.append(pid)
    return found


def end_processes(run: str, generation: str | None = None, ranks: str = "") -> list[int]:
    """Kill a run's processes; return those that live nevertheless after some seconds."""
    deadline = time.monotonic() + END_SECONDS
    while found := find_processes(run, generation, ranks):
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return found


def remove_memory(run: str) -> None:
    """Remove what the run has in shared memory."""
    for path in MEMORY.glob(f"tfcommx-{os.getuid()}-{run}-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_stale_memory() -> None:
    """Remove what runs have left in shared memory whose supervisor was killed.

    A process that uses such a folder holds a lock on it (checkpoint/memory/place.py), also one that
    this process cannot see, in another container that shares the memory.
    """
    for path in MEMORY.glob(f"tfcommx-{os.getuid()}-{'[0-9a-f]' * 16}-*"):
        with contextlib.suppress(OSError), _locked(path):
            newest = max(one.lstat().st_mtime for one in (path, *path.rglob("*")))
            run = path.name.split("-")[2]
            if time.time() - newest > STALE_SECONDS and not find_processes(run):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder of this user's exclusively. **Raises:** OSError if a process uses it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(opened).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def sweep(run: str, generation: str | None = None, ranks: str = "") -> list[int]:
    """End the processes; without a generation remove the memory files, too."""
    left = end_processes(run, generation, ranks)
    if generation is None:
        remove_memory(run)
    remove_stale_memory()
    return left


if __name__ == "__main__":
    sys.exit(1 if sweep(*sys.argv[1:]) else 0)
