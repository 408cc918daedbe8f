"""The files of slabs: their creation, their users, and the removal of unused ones.

Every process that uses a slab holds a shared flock on its file. A slab that can be locked
exclusively has no living owner, because the kernel releases these locks even after kill -9 and a
restart of the machine. Such a slab is removed, never reused.

Only files whose name has this user's number, and that `open_own` accepts, count as slabs, because
all users of a machine can write to its shared memory. All other files are ignored.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfcommx.core import ConfigurationError, DataError
from tfcommx.core.files import is_still_at, open_own, opened_own

MAGIC = b"TFCXSLB1"
PAGE = 4096
# Magic, samples, byte offset of the index, of the data, length, next free byte, id
_HEADER = struct.Struct("<8sqqqqqq")
# Byte offset of the field with the next free byte
NEXT_AT = 40
# Byte offset of the metadata, a JSON text that ends with a zero byte
METADATA_AT = 256
# FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PUNCH_HOLE = 1 | 2
# Flags of renameat2: paths are relative to the current folder; fail if the new name exists
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


class SlabError(DataError):
    """A slab that cannot be made or used."""


class Header(NamedTuple):
    """The header of a slab, checked against its file."""

    # Number of samples of the data set, which is the number of entries of the index
    samples: int
    # Byte offsets of the index and of the first record
    index_at: int
    data_at: int
    # Bytes of the file
    length: int
    # Allocated bytes, including header and index
    used: int
    # Random number, drawn when the slab was created
    id: int


def prefix() -> str:
    """Return the prefix of the names of this user's slabs, and folders of the disk level."""
    # The user's number, because all users of a machine share the folder of shared memory
    return f"tfcommx-{os.geteuid()}-"


def paths(folder: str | Path, ending: str = "slab") -> list[Path]:
    """Return the sorted paths in `folder` with the name of a slab of this user."""
    return sorted(Path(folder).glob(f"{prefix()}*.{ending}"))


def read_header(file: int) -> Header | None:
    """Return the header of an open file; None if it is no slab or damaged."""
    page = os.pread(file, _HEADER.size, 0)
    if len(page) < _HEADER.size:
        return None
    magic, *numbers = _HEADER.unpack(page)
    header = Header(*numbers)
    # Every number is checked, because an access beyond the end of a mapped file ends the process
    is_sound = (
        magic == MAGIC
        and header.length == os.fstat(file).st_size
        and 0 <= header.samples <= header.length // 8
        and header.index_at == PAGE
        and header.data_at == overhead_bytes(header.samples) <= header.used <= header.length
    )
    return header if is_sound else None


def overhead_bytes(count: int) -> int:
    """Return the bytes of the header and the index of a slab for `count` samples."""
    return PAGE + -(-8 * count // PAGE) * PAGE


@contextlib.contextmanager
def allocation_lock(file: int) -> Iterator[None]:
    """Hold the lock under which space of a slab is allocated.

    The lock belongs to the open file: it is released if its holder dies, and by no other close.
    """

    def ask(command: int, kind: int) -> None:
        # `struct flock` of 64-bit Linux: type, whence, start, bytes, and the process, which must be
        # 0 for these locks of open files
        fcntl.fcntl(file, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 8, 0))

    ask(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK)
    try:
        yield
    finally:
        ask(fcntl.F_OFD_SETLK, fcntl.F_UNLCK)


def try_exclusive_lock(file: int) -> bool:
    """Try to lock a slab exclusively; True if no other process uses it.

    A shared lock that this process held on the file is lost either way.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def free_memory(file: int) -> None:
    """Free the memory of a slab except its header."""
    # A remaining mapping, as TensorFlow may have, would keep all of it after the removal
    length = os.fstat(file).st_size - PAGE
    # If this fails, the memory is freed with the last mapping
    ctypes.CDLL(None).fallocate(file, _PUNCH_HOLE, ctypes.c_long(PAGE), ctypes.c_long(length))


def remove_if_unused(path: Path) -> bool:
    """Remove a slab of this user that has no living owner; return True if it was removed."""
    try:
        file = open_own(path, os.O_RDWR)
    except OSError:
        return False
    try:
        # Only with the lock, because its holder may have created a new slab in the meantime
        if try_exclusive_lock(file) and is_still_at(path, file):
            path.unlink(missing_ok=True)
            return True
        return False
    finally:
        os.close(file)


def open_or_create(
    path: Path, key: str, count: int, length: Callable[[], int], metadata: dict[str, str]
) -> tuple[int, bool]:
    """Open the slab at `path`, or create it, with its shared lock; return (file, is it new).

    The arguments are those of `Slab`; `length` may add to `metadata`.

    **Raises:** SlabError if another user's file is at `path`.
    """
    while True:
        remove_if_unused(path)
        try:
            file = open_own(path, os.O_RDWR)
        except FileNotFoundError:
            created = _make(path, key, count, length(), metadata)
            if created is not None:
                return created, True
            continue
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            raise SlabError(
                f"A slab of this user alone is required. {path} cannot be used: "
                f"{error.strerror or error}. Remove it, or give `memory` a folder that other users "
                "cannot write to."
            ) from error
        fcntl.flock(file, fcntl.LOCK_SH)
        # Its last user may have removed it between the opening and the lock
        if is_still_at(path, file):
            return file, False
        os.close(file)


def _make(path: Path, key: str, count: int, length: int, metadata: dict[str, str]) -> int | None:
    """Create a slab under another name, then rename it; None if another process was first."""
    part = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.part")
    file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Locked before it is named, because another process takes a slab without a lock for that of
        # a dead run, and removes it
        fcntl.flock(file, fcntl.LOCK_SH)
        _write_header(file, key, count, length, metadata)
        _rename_if_free(part, path)
        return file
    # Another process has named its slab first, or has removed this one's file before it was locked
    except (FileExistsError, FileNotFoundError):
        os.close(file)
        return None
    except BaseException:
        os.close(file)
        raise
    finally:
        part.unlink(missing_ok=True)


def _rename_if_free(part: Path, path: Path) -> None:
    """Rename a file atomically; raise FileExistsError if the name is taken."""
    # Not by `os.link` and `os.unlink`, because the slab would have two names in the meantime, which
    # `open_own` refuses
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(part), os.fsencode(path)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


def _write_header(file: int, key: str, count: int, length: int, metadata: dict[str, str]) -> None:
    data_at = overhead_bytes(count)
    length = max(length, data_at)
    os.ftruncate(file, length)
    # The index is stored to through the mapping, where a full file system would end the process by
    # a signal; samples take memory only when they are written
    os.posix_fallocate(file, 0, data_at)
    text = json.dumps({"key": key, "pid": os.getpid(), "created": time.time(), **metadata}).encode()
    if len(text) >= PAGE - METADATA_AT:
        raise ConfigurationError(
            f"The facts of a slab must fit {PAGE - METADATA_AT} bytes. Received {len(text)}."
        )
    identity = secrets.randbits(63)
    os.pwrite(file, _HEADER.pack(MAGIC, count, PAGE, data_at, length, data_at, identity), 0)
    os.pwrite(file, text + b"\0", METADATA_AT)


def remove_unused(folder: Path) -> list[Path]:
    """Remove this user's slabs in `folder`, complete or not, that no process uses; return them."""
    candidates = [*paths(folder), *paths(folder, "part")]
    return [path for path in sorted(candidates) if remove_if_unused(path)]


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a slab: key, source, pid, created; {} if they are not readable."""
    try:
        with opened_own(path) as file:
            return metadata_of(file)
    except OSError:
        return {}


def metadata_of(file: int) -> dict[str, Any]:
    """Return the metadata of an open file, like `read_metadata`."""
    page = os.pread(file, PAGE, 0)
    try:
        metadata = json.loads(page[METADATA_AT:].split(b"\0", 1)[0])
    except (ValueError, RecursionError):
        return {}
    return metadata if page.startswith(MAGIC) and isinstance(metadata, dict) else {}


def reserved_bytes(path: Path) -> int:
    """Return the bytes that a slab has reserved and not yet taken; 0 if it does not exist.

    It reserves `need` of its metadata or, without that, its length.
    """
    try:
        with opened_own(path) as file:
            header = read_header(file)
            if header is None:
                return 0
            need = metadata_of(file).get("need", header.length)
            return max(0, min(int(need), header.length) - header.used)
    except (OSError, TypeError, ValueError, OverflowError):
        return 0


def slab_state(path: Path) -> tuple[int, int, int, bool]:
    """Return the fill level of a slab, and whether it is in use.

    Returns:
        Number of samples of the data set, number of samples that are present, allocated bytes, and
        whether a living process uses the slab.

    **Raises:** SlabError if the file is no slab; OSError if it is not this user's.
    """
    with opened_own(path) as file:
        header = read_header(file)
        if header is None:
            raise SlabError(f"{path} is no slab. Remove it by hand if nothing needs it.")
        index = np.frombuffer(os.pread(file, 8 * header.samples, header.index_at), np.int64)
        filled = int(np.count_nonzero(index > 0))
        return header.samples, filled, header.used, not try_exclusive_lock(file)
