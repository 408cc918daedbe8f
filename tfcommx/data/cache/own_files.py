"""Opens files in folders that other users may write to, such as /dev/shm.

Any user can make a file there under any name. So only a regular file counts that belongs to this
user, that no other user may open, and that has no second name: everything else is another's.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of this user; return its descriptor.

    A link is not followed, and a pipe does not block. The checks are made on what was opened, so
    that nothing can take its place meanwhile.

    Args:
        path: of the file.
        flags: of `os.open`.

    **Raises:** OSError if it cannot be opened; PermissionError, with the reason, if it is another
    user's, or another could open it.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if reason := _why_foreign(os.fstat(file)):
            raise PermissionError(errno.EPERM, reason, str(path))
    except BaseException:
        os.close(file)
        raise
    return file


def _why_foreign(facts: os.stat_result) -> str:
    """Return why a file is not this user's alone; empty if it is."""
    if not stat.S_ISREG(facts.st_mode):
        return "it is no regular file"
    if facts.st_uid != os.geteuid():
        return f"it belongs to user {facts.st_uid}, this process runs as user {os.geteuid()}"
    if facts.st_mode & 0o077:
        return f"its rights are {stat.filemode(facts.st_mode)}: other users can open it"
    if facts.st_nlink > 1:
        return f"it has {facts.st_nlink} names"
    return ""


def is_own_folder(path: Path) -> bool:
    """Return True if a folder is this user's, is no link, and no other user can write to it."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return (
        stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
    )
