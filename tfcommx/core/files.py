"""Files: paths that are refused, whole writes, one error for each damaged file, private folders.

A file counts as this user's only if it is a regular file, belongs to the user, cannot be opened by
other users, and has no second name, because any user can make a file of any name in a folder such
as /dev/shm.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfcommx.core.errors import ConfigurationError, DataError, TfcommxError

# One slash is enough, because `pathlib` turns `gs://bucket` into `gs:/bucket`
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# A variable or command of a shell: ${NAME} anywhere, others where a part of the path begins
_VARIABLE = re.compile(r"\$\{|(?:^|/)\$")
# Errors of fsync on a folder, because some network file systems do not support it
NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
# Errors of flock on file systems without locks, such as Lustre without `-o flock`
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
# Longest name of a file, in bytes (NAME_MAX of Linux)
LONGEST_NAME = 255


def local_path(option: str, path: str | os.PathLike[str]) -> Path:
    """Return a path of a file system that is mounted; expand a `~` at its beginning.

    >>> local_path("folder", "runs/first").as_posix()
    'runs/first'

    **Raises:** ConfigurationError for the address of an object store or a server (`gs://`, `s3://`,
    `hdfs://`, `file://`), for a variable that no shell has expanded, and for an empty text.
    """
    if not isinstance(path, str | os.PathLike) or not (text := str(path)):
        raise ConfigurationError(
            f"`{option}` must be the path of a file or folder. Received {path!r}. Was it taken "
            "from a variable that is not set?"
        )
    if _ADDRESS.match(text):
        raise ConfigurationError(
            f"`{option}` must be a path of a mounted file system. Received {text!r}, an address. "
            "Give a path alone, without `file:`. Mount other storage (gcsfuse, s3fs, NFS), or "
            "write to a local folder and copy it."
        )
    if _VARIABLE.search(text):
        raise ConfigurationError(
            f"`{option}` must be a path without variables. Received {text!r}, which no shell has "
            "replaced. Give the folder itself."
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"`{option}` must be a path whose `~` is a known home. Received {text!r}: {error} Give "
            "the folder itself."
        ) from error


@contextlib.contextmanager
def reading(
    kind: str, path: str | os.PathLike[str], remedy: str, error: type[TfcommxError] = DataError
) -> Iterator[None]:
    """Replace any exception of a parser for a damaged file by an error that names the file.

    >>> with reading("A plan", "plan.json", "Make it again."):
    ...     [][0]
    Traceback (most recent call last):
    tfcommx.core.errors.DataError: A plan is required in plan.json. Received IndexError: ...
    """
    try:
        yield
    # Any class, because parsers of NumPy, zip and JSON raise a dozen classes for files that were
    # truncated or changed
    except Exception as problem:
        # An inner `reading` has named the file already
        if isinstance(problem, error) and str(path) in str(problem):
            raise
        text = " ".join(str(problem).split())[:300].removesuffix(".")
        name = "" if isinstance(problem, TfcommxError) else f"{type(problem).__name__}: "
        raise error(f"{kind} is required in {path}. Received {name}{text}. {remedy}") from problem


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; rename it to `path` once it is complete and on the disk.

    The folder is created. If writing fails, as on a full disk, an existing file is unchanged.

    **Cost:** waits until the disk has the file. **Raises:** OSError.
    """
    path = Path(os.path.realpath(path))  # A symbolic link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(_part_name(path))
    try:
        yield part
        put_in_place(part, path)
    except OSError as error:
        if error.filename is None:  # As if the disk is full
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


@contextlib.contextmanager
def others_wait(path: Path) -> Iterator[None]:
    """Exclude the other processes of the machine; on a file system without locks, none.

    Args:
        path: file to lock; it is created, and stays.
    """
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def _part_name(path: Path) -> str:
    """Return the name under which a file is written, as long as its own at most."""
    # A random name, because two processes may write the same file
    end = f"-{secrets.token_hex(4)}{path.suffix}"
    stem, limit = os.fsencode(path.stem), LONGEST_NAME - 1 - len(os.fsencode(end))
    # A cut character is left out, because some file systems refuse names that are not UTF-8
    text = path.stem if len(stem) <= limit else stem[:limit].decode(errors="ignore")
    return f".{text}{end}"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a complete UTF-8 file, or leave the existing one unchanged. **Raises:** OSError."""
    target = Path(path)
    if target.exists() and not target.is_file():  # Such as /dev/stdout, which cannot be replaced
        target.write_text(text, encoding="utf-8")
        return
    with replacing(target) as part:
        part.write_text(text, encoding="utf-8")


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, with null for NaN and infinities, because JSON lacks these.

    >>> json_text({"loss": [0.5, float("nan")]})
    '{"loss": [0.5, null]}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def put_in_place(part: Path, path: Path) -> None:
    """Rename a written file; both are on the disk afterwards, even if the machine fails."""
    _sync(part)
    # Before the renaming, because `part` names no file afterwards
    written = os.stat(part)
    try:
        os.replace(part, path)
    except FileNotFoundError:
        # NFS may answer so to a request that it has received twice, and carried out
        if not (path.exists() and os.path.samestat(path.stat(), written)):
            raise
    try:
        _sync(path.parent)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise


def _sync(path: Path) -> None:
    # For writing, because SMB flushes no file that is opened for reading alone
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def open_private(path: Path) -> int:
    """Create or open a folder that only this user can enter; return its descriptor.

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
    # In shared memory or /tmp another user who knows the name may have created the folder, and its
    # owner can read, replace and redirect all files in it
    status = os.fstat(opened)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(opened)
        raise PermissionError(
            f"{path} must belong to user {os.geteuid()}, with mode 0700. It belongs to user "
            f"{status.st_uid}, with mode {stat.S_IMODE(status.st_mode):04o}. Another program may "
            "have made it to read or replace the files in it: remove it."
        )
    return opened


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of this user; return its descriptor.

    A link is not followed, and a pipe does not block.

    **Raises:** OSError if it cannot be opened; PermissionError, with the reason, if it is another
    user's, or another user could open it.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # The descriptor and not the path, because the file at the path could be replaced meanwhile
        if reason := _why_foreign(os.fstat(file)):
            raise PermissionError(errno.EPERM, reason, str(path))
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def opened_own(path: Path) -> Iterator[int]:
    """Open a file as `open_own` does, to read it in a block; yield its descriptor."""
    file = open_own(path)
    try:
        yield file
    finally:
        os.close(file)


def is_still_at(path: Path, opened: int) -> bool:
    """Return True if an open file or folder is still the one at `path`."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(opened))
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ESTALE:  # Another host has removed it, on NFS
            return False
        raise


def crc_of(path: str | os.PathLike[str]) -> int:
    """Return the CRC-32 of a file's bytes. **Cost:** one read. **Raises:** OSError."""
    crc = 0
    with open(path, "rb") as file:
        # In parts, because a file may be larger than the memory
        while data := file.read(1 << 20):
            crc = zlib.crc32(data, crc)
    return crc


def _why_foreign(facts: os.stat_result) -> str:
    """Return the reason why a file is not this user's alone, or ""."""
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
    """Return True if a folder is this user's, not a link, and not writable for other users."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return (
        stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
    )
