"""The folder in a host's shared memory that holds the snapshots of one checkpoint folder.

    /dev/shm/tfcommx-1000-5f0c..-node1/6b1d93aa/        mode 0700
      model-0040.npz                      of save 40: weights and optimizers' state; one a host
      residuals-0040-rank-0002.npz        what rank 2 alone has, and the head of the save
      residuals-0040-rank-0006.npz        the same of a rank on the host before: a mirror

A file has its name when it is whole; the checksums of its arrays are in it (a zip file has them).
Each process that uses the run's folder holds a shared flock on it, which the kernel drops at the
process's death: the sweep of another run removes only folders that it can lock exclusively. The
kernel knows the lock also where the processes are hidden, as in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from tfcommx.checkpoint.files import Head, head_of, memory_model_name, residuals_name
from tfcommx.core import CheckpointError
from tfcommx.core.files import open_private, reading

# Of a damaged file
DELETE = "Delete it; an older snapshot, or the last checkpoint on disk, is taken."
_NAME = re.compile(r"(?:model-(\d{4,})|residuals-(\d{4,})-rank-(\d{4,}))\.npz")


class Held(NamedTuple):
    """What a host's shared memory has of one save."""

    head: Head
    # Bytes of each file, by name
    files: dict[str, int]


class SnapshotFolder:
    """This host's folder for the snapshots of a checkpoint folder.

    Args:
        memory: this host's folder of the run.
        folder: as the program calls the checkpoint folder, the same on all ranks.
    """

    def __init__(self, memory: Path, folder: Path) -> None:
        self.path = memory / f"{zlib.crc32(str(folder).encode()):08x}"

    def make(self) -> None:
        """Make the folder, or check that it is this user's alone; keep other runs from removing it.

        **Raises:** OSError; PermissionError if another user made it, or can enter it.
        """
        _hold(self.path.parent)
        os.close(open_private(self.path))

    def write(self, name: str, arrays: Mapping[str, np.ndarray]) -> int:
        """Write a file; return its bytes. **Raises:** OSError; then nothing is left of it."""
        with self.writing(name) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type] # None is called allow_pickle
            file.flush()
            return os.fstat(file.fileno()).st_size

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a new file that no other user can read; it gets its name when it is whole.

        If writing fails, nothing is left of it.

        **Raises:** OSError; ValueError for a name that no file of a snapshot has.
        """
        check_file_name(name)
        folder, part = open_private(self.path), f".{name}.{secrets.token_hex(4)}.part"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            opened = os.open(part, flags, 0o600, dir_fd=folder)
            try:
                with os.fdopen(opened, "wb") as file:
                    yield file
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
        finally:
            os.close(folder)

    def held(self) -> dict[int, Held]:
        """Return what is here and intact, by the number of the save; delete what is damaged.

        In the place of a damaged file another host's copy can come. **Cost:** every file is read
        once.
        """
        names: dict[int, dict[str, int]] = {}
        heads: dict[int, Head] = {}
        for path in self._files():
            found = _NAME.fullmatch(path.name)
            if found is None:
                continue
            number = int(found[1] or found[2])
            try:
                _check(path)
                if found[3]:
                    heads[number] = read_head(path)
            except CheckpointError:
                path.unlink(missing_ok=True)
                continue
            names.setdefault(number, {})[path.name] = path.stat().st_size
        return {number: Held(head, names[number]) for number, head in heads.items()}

    def keep(self, saves: set[int], rank: int | None = None) -> None:
        """Delete all files except those of some saves; with `rank` only those of that rank."""
        for path in self._files():
            found = _NAME.fullmatch(path.name)
            if found is None:
                if rank is None:
                    path.unlink(missing_ok=True)
                continue
            ours = rank is None or (found[3] is not None and int(found[3]) == rank)
            if ours and int(found[1] or found[2]) not in saves:
                path.unlink(missing_ok=True)

    def keep_models(self, saves: set[int]) -> None:
        """Delete the models of all other saves."""
        for path in self._files():
            found = _NAME.fullmatch(path.name)
            if found and found[1] and int(found[1]) not in saves:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.path.iterdir()) if self.path.is_dir() else []


def needed(head: Head) -> list[str]:
    """Return the names of all files of a save."""
    ranks = [residuals_name(head.save, rank) for rank in range(head.ranks)]
    return [memory_model_name(head.save), *ranks]


def head_array(head: Head) -> np.ndarray:
    """Return a head as an array of a file."""
    return np.array(json.dumps(head._replace(older=())._asdict()))


def check_file_name(name: str) -> None:
    """Refuse a name that no file of a snapshot has. **Raises:** ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"no file of a snapshot: {name!r}")


def read_head(path: Path) -> Head:
    """Return the head in a rank's file. **Raises:** CheckpointError for a damaged file."""
    with (
        reading("A rank's file of a snapshot", path, DELETE, CheckpointError),
        np.load(path) as stored,
    ):
        found: dict[str, Any] = json.loads(str(stored["head"]))
        return head_of(found)


def _check(path: Path) -> None:
    """Compare the checksums of a file. **Raises:** CheckpointError for a damaged file."""
    with (
        reading("A file of a snapshot", path, DELETE, CheckpointError),
        zipfile.ZipFile(path) as file,
    ):
        if damaged := file.testzip():
            raise ValueError(f"a wrong checksum of {damaged}")


# Descriptors of the runs' folders, whose locks this process keeps until it ends
_held: dict[Path, int] = {}


def _hold(memory: Path) -> None:
    """Make the folder of a run, and keep the sweep of other runs from removing it."""
    before = _held.get(memory)
    if before is not None and _is_still_at(memory, before):
        os.close(open_private(memory))  # Checks the owner again
        return
    while True:
        opened = open_private(memory)
        fcntl.flock(opened, fcntl.LOCK_SH)
        if _is_still_at(memory, opened):  # Else a sweep has removed it meanwhile
            break
        os.close(opened)
    _held[memory] = opened
    if before is not None:
        os.close(before)


def _is_still_at(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(opened))
    except FileNotFoundError:
        return False
