"""Lock a checkpoint folder, so that one run at a time saves into it.

    folder/.checkpoint.lock     {"run": "5f0c...", "generation": 0, "host": "node1", "pid": 4711}

Rank 0, and the first rank of each node with a separate folder, hold a flock on that file until the
process ends, or `fit` does. The kernel drops it when the process dies, and so does the server of an
NFS folder (for a dead host when its lease ends, after about 90 s), so the lock file of a dead run
blocks no restart. On a file system without locks every run replaces the lock file by a new one,
and the earlier run ends. Where each host has its own locks (`local_lock` of NFS, `localflock` of
Lustre), the run that came last has its name in the file, and the earlier run ends, too.
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
from tfcommx.core.files import NO_LOCKS, is_still_at
from tfcommx.launch.supervision import supervision

LOCK = ".checkpoint.lock"
# Limit on the bytes read from a lock file
LARGEST = 4096
# Time limit for the end of a run that was asked to end
WAIT_SECONDS = 5.0

# With the number of the process, the name of its run if no supervisor has set one
_PROCESS = secrets.token_hex(8)


class Owner(NamedTuple):
    """The run and process that save into a folder."""

    # Name of the run, equal on all ranks and in all generations
    run: str
    # Generation of a supervised run, from 0
    generation: int
    host: str
    pid: int

    @staticmethod
    def here() -> Owner:
        """Return this process as the owner; all ranks use the result of rank 0."""
        supervised = supervision()
        # With the number, because forks of a process that has drawn the name are other runs
        run, generation = f"{_PROCESS}-{os.getpid()}", 0
        if supervised is not None:
            run, generation = supervised.run, supervised.generation
        return Owner(run, generation, socket.gethostname(), os.getpid())


class FolderInUse(CheckpointError, OSError):
    """A folder into which another run saves."""


# Descriptors of the lock files that this process holds, by folder
_held: dict[Path, int] = {}


def take(folder: Path, owner: Owner) -> None:
    """Create a folder and hold its lock; no effect if this run holds it already.

    **Ranks:** local; rank 0 first, then the first rank of each other node.
    **Raises:** FolderInUse that names the other run; OSError.
    """
    owner = owner._replace(host=socket.gethostname(), pid=os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    path, deadline = folder / LOCK, time.monotonic() + WAIT_SECONDS
    if folder in _held:
        holder, is_there = _read(path), is_still_at(path, _held[folder])
        # Also in the same file, because another host may have locked it, if each has its own locks
        if holder is not None and not (
            _is_same(owner, holder) or _may_replace(owner, holder) or holder[2:] == owner[2:]
        ):
            raise _in_use(folder, holder)
        if is_there:
            return
        os.close(_held.pop(folder))
    while True:
        opened = _open(path)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            holder = _read(path)
            if holder is not None and _is_same(owner, holder):
                return  # Another rank of this run holds it, in a folder that both see
            # A host that cannot be reached may still run an earlier generation of this run, which
            # detects the new file at its next save, and may not save again
            if holder is not None and _may_replace(owner, holder):
                _replace(folder, owner)
                return
            if time.monotonic() > deadline:
                raise _in_use(folder, holder) from None
            time.sleep(0.1)
            continue
        except OSError as error:
            os.close(opened)
            if error.errno not in NO_LOCKS:
                raise
            _replace(folder, owner)
            return
        if is_still_at(path, opened):
            _keep(folder, opened, owner)
            return
        os.close(opened)
        # Such as on a file system that numbers its files anew at each look
        if time.monotonic() > deadline:
            raise OSError(errno.ESTALE, "The lock file is another one at each look", str(path))


def _open(path: Path) -> int:
    """Open a lock file, or create it; for reading alone if it is another user's."""
    # No links, because another user of a shared folder could link to a file of this user
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, _mode(path))
    except PermissionError as error:
        try:
            # Enough for a lock, by which a dead run of another user is recognised
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
        except OSError:
            raise error from None


def _mode(path: Path) -> int:
    """Return the mode of a lock file: readable for the users that may write into its folder."""
    # Because any user that can read a file can lock it, and would block the saves
    return 0o600 | (path.parent.stat().st_mode & 0o022) << 1


def _keep(folder: Path, opened: int, owner: Owner) -> None:
    """Write the owner into a file that this process has locked, and keep it open."""
    try:
        if fcntl.fcntl(opened, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:  # Another user's
            _replace(folder, owner)
            os.close(opened)
            return
        holder = _read(folder / LOCK)
        # Not over the name of another rank of this run, whose lock only its own host sees
        if holder is None or not _is_same(owner, holder):
            _write(opened, owner)
    except OSError:
        os.close(opened)
        raise
    _held[folder] = opened


def release(folder: Path) -> None:
    """Unlock a folder, if this process holds its lock."""
    folder = folder.resolve()
    opened = _held.pop(folder, None)
    if opened is not None:
        with contextlib.suppress(OSError):
            # Unlinked before it is unlocked, because another run could take the lock in between,
            # and this process would remove the file of that run
            if is_still_at(folder / LOCK, opened):
                (folder / LOCK).unlink()
        os.close(opened)


@atexit.register
def _release_all() -> None:
    for folder in list(_held):
        release(folder)


def _forget_all() -> None:
    """Close the descriptors in a forked process, because its parent owns the locks."""
    for opened in _held.values():
        os.close(opened)
    _held.clear()


os.register_at_fork(after_in_child=_forget_all)


def seen_owner(folder: Path) -> Owner | None:
    """Return the owner of a folder, as this rank sees it; None without a readable lock file."""
    return _read(folder / LOCK)


def _is_same(owner: Owner, holder: Owner) -> bool:
    return (owner.run, owner.generation) == (holder.run, holder.generation)


def _may_replace(owner: Owner, holder: Owner) -> bool:
    return owner.run == holder.run and owner.generation > holder.generation


def _replace(folder: Path, owner: Owner) -> None:
    """Replace the present lock file by one of this process."""
    part = folder / f"{LOCK}-{secrets.token_hex(4)}"
    opened = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _mode(part))
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
    os.fsync(opened)  # Because ranks on other hosts read it


def _read(path: Path) -> Owner | None:
    try:
        # Not blocking, because the file may be a pipe
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            content: dict[str, Any] = json.loads(file.read(LARGEST))
        return Owner(
            str(content["run"]), int(content["generation"]), content["host"], int(content["pid"])
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _in_use(folder: Path, holder: Owner | None) -> FolderInUse:
    who = "which does not say its name"
    if holder is not None:
        who = f"run {holder.run}, process {holder.pid} on {holder.host}"
    return FolderInUse(
        f"another run saves into {folder}: {who}. End it, or give this run another folder."
    )
