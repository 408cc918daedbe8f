"""End a run's remaining processes on this host, and remove its memory files.

    python -I -S sweep.py RUN GENERATION ranks     ranks of that generation, without the launcher
    python -I -S sweep.py RUN GENERATION           all processes of that generation
    python -I -S sweep.py RUN                      all processes of the run, and its memory files

They are found by the environment that the supervisor has set for them. A process of the run that
must outlive a generation has no TFCOMMX_GENERATION in its environment. Imports only the standard
library, because the supervisor also calls it over ssh.
"""

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
# Variables that horovodrun and mpirun set for ranks
RANK = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=")
MEMORY = Path("/dev/shm")
# Age without a change after which the files of a run without processes are removed
STALE_SECONDS = 3600.0
# Time limit for the kernel to end killed processes
END_SECONDS = 5.0


def find_processes(run: str, generation: str | None = None, ranks: str = "") -> list[int]:
    """Return this user's processes of a run, or of one of its generations, or that one's ranks."""
    wanted = {f"{RUN}={run}".encode()}
    if generation is not None:
        wanted.add(f"{GENERATION}={generation}".encode())
    pids = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        # The process may have ended meanwhile, or belong to another user
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            is_rank = any(variable.startswith(RANK) for variable in variables)
            if wanted <= set(variables) and pid != os.getpid() and (is_rank or not ranks):
                pids.append(pid)
    return pids


def end_processes(run: str, generation: str | None = None, ranks: str = "") -> list[int]:
    """Kill a run's processes; return those that still exist after `END_SECONDS`."""
    deadline = time.monotonic() + END_SECONDS
    # Repeatedly, because a process may have started another one before it was killed
    while pids := find_processes(run, generation, ranks):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return pids


def remove_stale_memory() -> None:
    """Remove the folders in shared memory of runs whose supervisor was killed.

    A process that uses such a folder holds a lock on it (checkpoint/place.py), so processes of
    another container that shares the memory, which this process cannot see, are respected, too.
    """
    for path in MEMORY.glob(f"tfcommx-{os.getuid()}-{'[0-9a-f]' * 16}-*"):
        with contextlib.suppress(OSError), _locked(path):
            newest = max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
            run = path.name.split("-")[2]
            if time.time() - newest > STALE_SECONDS and not find_processes(run):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder of this user's exclusively. **Raises:** OSError if a process uses it."""
    # Not through a link, because any user may put one into shared memory
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
    survivors = end_processes(run, generation, ranks)
    for path in MEMORY.glob(f"tfcommx-{os.getuid()}-{run}-*"):
        if generation is None:
            shutil.rmtree(path, ignore_errors=True)
            continue
        # Not stale for another hour, because the next generation continues from these files, and no
        # process holds them until it has started
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
    remove_stale_memory()
    return survivors


if __name__ == "__main__":
    sys.exit(1 if sweep(*sys.argv[1:]) else 0)
