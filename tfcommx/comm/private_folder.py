"""A folder in a place where every user may make one, such as /tmp: used only if it is one's own."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Make a folder that this user alone can use, or take the one that is there; return it.

    Another user may have made it before, or a link in its place, and would then read and replace
    what is written there.

    **Raises:** OSError if it cannot be made; PermissionError if others own it or can write to it.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{path} must be a folder that user {os.geteuid()} owns and nobody else can write to. "
            f"Received {stat.filemode(found.st_mode)} of user {found.st_uid}. Have it removed"
        )
    return path
