"""Files: paths that are refused, whole writes, one error for each damaged file, private folders.

In a folder that other users may write to, such as /dev/shm, any user can make a file of any name.
So only a regular file counts that belongs to this user, that no other user may open, and that has
no second name: everything else is another's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tfcommx.core.errors import ConfigurationError, DataError, TfcommxError

# A single slash, too: `pathlib` makes `gs:/bucket` of `gs://bucket`
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
# Of fsync on a folder, which some network file systems do not have
NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)


def local_path(what: str, path: str | os.PathLike[str]) -> Path:
    """Return a path of a file system that is mounted; expand a `~` at its beginning.

    >>> local_path("folder", "runs/first").as_posix()
    'runs/first'

    Args:
        what: the option that the path was given for, for the message.
        path: as the user gave it.

    **Raises:** ConfigurationError for the address of an object store or a server (`gs://`, `s3://`,
    `hdfs://`, `file://`), for a variable that no shell has replaced, and for an empty text.
    """
    if not isinstance(path, str | os.PathLike) or not (text := str(path)):
        raise ConfigurationError(
            f"`{what}` must be the path of a file or folder. Received {path!r}. Was it taken from "
            "a variable that is not set?"
        )
    if address := _ADDRESS.match(text):
        remedy = (
            f"Give the path alone: {text[len('file:') :].replace('//', '/', 1)!r}."
            if address[1].lower() == "file"
            else "Mount it (gcsfuse, s3fs, NFS) and give the path there, or write to a local "
            "folder and copy it."
        )
        raise ConfigurationError(
            f"`{what}` must be a path of a mounted file system. Received {text!r}, the address of "
            f"another kind of storage. {remedy}"
        )
    if text.startswith("$"):
        raise ConfigurationError(
            f"`{what}` must be a path without variables. Received {text!r}, which no shell has "
            "replaced. Give the folder itself."
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"`{what}` must be a path whose `~` is a known home. Received {text!r}: {error} Give "
            "the folder itself."
        ) from error


@contextlib.contextmanager
def reading(
    what: str, path: str | os.PathLike[str], remedy: str, error: type[TfcommxError] = DataError
) -> Iterator[None]:
    """Replace whatever a parser raises for a damaged file by an error that names the file.

    >>> with reading("A plan", "plan.json", "Make it again."):
    ...     [][0]
    Traceback (most recent call last):
    tfcommx.core.errors.DataError: A plan is required in plan.json. Received IndexError: ...

    Parsers of NumPy, zip and JSON raise errors of a dozen classes for files that were cut or
    changed, so all of them are caught, except those of a process that is to end.

    Args:
        what: the kind of file, with its article.
        path: of the file.
        remedy: what the user does about it; a sentence.
        error: class of the error.
    """
    try:
        yield
    except Exception as problem:
        if isinstance(problem, error) and str(path) in str(problem):
            raise
        text = " ".join(str(problem).split())[:200].removesuffix(".")
        name = "" if isinstance(problem, TfcommxError) else f"{type(problem).__name__}: "
        raise error(f"{what} is required in {path}. Received {name}{text}. {remedy}") from problem


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield another name to write to; give the file its own name once it is whole and on the disk.

    The folder is made.

    If writing fails, as on a full disk, the file that was there before stays as it is. The other
    name is random, because two processes may write the same file, and it ends as `path` does.

    **Cost:** waits until the disk has the file. **Raises:** OSError.
    """
    path = Path(os.path.realpath(path))  # A link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
    try:
        yield part
        put_in_place(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file whole, or leave the one that was there. **Raises:** OSError."""
    target = Path(path)
    if target.exists() and not target.is_file():  # Such as /dev/stdout, which has no other name
        target.write_text(text, encoding="utf-8")
        return
    with replacing(target) as part:
        part.write_text(text, encoding="utf-8")


def put_in_place(part: Path, path: Path) -> None:
    """Give a written file its name; both are on the disk afterwards, also if the machine fails."""
    _sync(part)
    os.replace(part, path)
    try:
        _sync(path.parent)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def open_private(path: Path) -> int:
    """Make a folder that this user alone can enter, or open it; return its descriptor.

    A folder in shared memory or in /tmp may have been made before, by another user who knows its
    name: whoever owns it reads, replaces and redirects all that is written there.

    **Raises:** PermissionError for a link, a folder of another user, or one that others can enter;
    OSError.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PermissionError(f"{path} must be a folder. It is a link, or a file.") from error
        raise
    status = os.fstat(opened)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(opened)
        raise PermissionError(
            f"{path} must belong to user {os.geteuid()}, with mode 0700. It belongs to user "
            f"{status.st_uid}, with mode {stat.S_IMODE(status.st_mode):04o}. Another program may "
            "have made it to read or replace what is written there: remove it."
        )
    return opened


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
