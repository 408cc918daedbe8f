"""One run at a time saves into a folder.

    folder/.checkpoint.lock     {"run": "5f0c...", "generation": 0, "host": "node1", "pid": 4711}

Rank 0, and the first rank of each node whose folder is another, hold a flock on that file until the
process ends, or `fit` does. The kernel drops it at any death, and so does the server of an NFS
folder (for a host that has died when its lease ends, after some 90 s), so a lock file that a dead
run has left blocks no restart. A later generation of the same supervised run puts a lock file of
its own in the place of the one that is held, because a host that cannot be reached may still run
the generation before; that one finds out at its next save, and may save no more. On a file system
without locks every run does so: the one that came first ends.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

from tfcommx.core import CheckpointError
from tfcommx.launch.supervision import supervision

LOCK = ".checkpoint.lock"
# Bytes of a lock file; a longer one is none
LARGEST = 4096
# For a run that was told to end, and has not yet
WAIT_SECONDS = 5.0
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

# A process's own name of its run, if no supervisor has given one
_PROCESS = secrets.token_hex(8)


class Owner(NamedTuple):
    """Who saves into a folder."""

    # Equal on all ranks and in all generations
    run: str
    # Of a supervised run, from 0
    generation: int
    host: str
    pid: int

    @staticmethod
    def here() -> Owner:
        """Return this process, which names the run on rank 0."""
        supervised = supervision()
        run, generation = (
            (_PROCESS, 0) if supervised is None else (supervised.run, supervised.generation)
        )
        return Owner(run, generation, socket.gethostname(), os.getpid())


class FolderInUse(CheckpointError, OSError):
    """A folder into which another run saves."""


# Descriptors of the lock files that this process holds, by folder
_held: dict[Path, int] = {}


def take(folder: Path, owner: Owner) -> None:
    """Hold the lock of a folder, which is made; nothing happens if this run has it.

    Args:
        folder: of a checkpoint.
        owner: rank 0 of this run.

    **Ranks:** local; rank 0 first, then the first rank of each other node.
    **Raises:** FolderInUse that names the other run; OSError.
    """
    owner = owner._replace(host=socket.gethostname(), pid=os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    path, deadline = folder / LOCK, time.monotonic() + WAIT_SECONDS
    if folder in _held:
        if _is_still_at(path, _held[folder]):
            return
        other = _read(path)
        if other is not None and not _is_same(owner, other) and not _may_replace(owner, other):
            raise _in_use(folder, other)
        os.close(_held.pop(folder))
    while True:
        # A link of another user, in a folder that several write to, may lead to a file of this one
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            other = _read(path)
            if other is not None and _is_same(owner, other):
                return  # Another rank of this run has it, in a folder that both see
            if other is not None and _may_replace(owner, other):
                _replace(folder, owner)
                return
            if time.monotonic() > deadline:
                raise _in_use(folder, other) from None
            time.sleep(0.1)
            continue
        except OSError as error:
            os.close(opened)
            if error.errno not in NO_LOCKS:
                raise
            _replace(folder, owner)
            return
        if _is_still_at(path, opened):
            _write(opened, owner)
            _held[folder] = opened
            return
        os.close(opened)


def release(folder: Path) -> None:
    """Let other runs save into a folder, if this process holds its lock."""
    folder = folder.resolve()
    opened = _held.pop(folder, None)
    if opened is not None:
        with contextlib.suppress(OSError):
            if _is_still_at(folder / LOCK, opened):
                (folder / LOCK).unlink()
        os.close(opened)


@atexit.register
def _release_all() -> None:
    for folder in list(_held):
        release(folder)


def _forget_all() -> None:
    """In a process that was forked: the locks are its parent's, and shall end with that."""
    for opened in _held.values():
        os.close(opened)
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)


def seen_owner(folder: Path) -> Owner | None:
    """Return who saves into a folder, as this rank sees it; None if it sees no lock file."""
    return _read(folder / LOCK)


def _is_same(owner: Owner, other: Owner) -> bool:
    return (owner.run, owner.generation) == (other.run, other.generation)


def _may_replace(owner: Owner, other: Owner) -> bool:
    return owner.run == other.run and owner.generation > other.generation


def _replace(folder: Path, owner: Owner) -> None:
    """Put a lock file of this process in the place of the one that is there."""
    part = folder / f"{LOCK}-{secrets.token_hex(4)}"
    opened = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # Without locks the name alone counts
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(opened, owner)
        os.replace(part, folder / LOCK)
    except OSError:
        os.close(opened)
        part.unlink(missing_ok=True)
        raise
    _held[folder] = opened


def _write(opened: int, owner: Owner) -> None:
    text = json.dumps(owner._asdict()).encode()
    os.ftruncate(opened, 0)
    os.pwrite(opened, text, 0)
    os.fsync(opened)  # So that the ranks on other hosts can read it


def _read(path: Path) -> Owner | None:
    try:
        # Not blocking, for a pipe
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            found: dict[str, Any] = json.loads(file.read(LARGEST))
        return Owner(str(found["run"]), int(found["generation"]), found["host"], int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _in_use(folder: Path, other: Owner | None) -> FolderInUse:
    who = "which does not say its name"
    if other is not None:
        who = f"run {other.run}, process {other.pid} on {other.host}"
    return FolderInUse(
        f"another run saves into {folder}: {who}. End it, or give this run another folder."
    )


def _is_still_at(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False
