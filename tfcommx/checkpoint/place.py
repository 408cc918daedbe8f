"""The folder in a host's shared memory that holds the snapshots of one checkpoint folder.

    /dev/shm/tfcommx-1000-5f0c..-node1/6b1d93aa/        mode 0700
      model-0040.npz                      weights and optimizers' state of save 40; one a host
      residuals-0040-rank-0002.npz        state of rank 2 alone, and the head of the save
      residuals-0040-rank-0006.npz        the same for a rank on the previous host: a mirror

A file receives its name when it is complete; as a zip file it has the checksums of its arrays.
"""

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
from typing import IO, NamedTuple

import numpy as np

from tfcommx.checkpoint.files import Head, arrays_in, head_of, memory_model_name, residuals_name
from tfcommx.core import CheckpointError, json_text
from tfcommx.core.files import is_still_at, open_private, reading

# Remedy for a damaged file
DELETE = "Delete it; an older snapshot, or the last checkpoint on disk, is taken."
_NAME = re.compile(r"(?:model-(\d{4,})|residuals-(\d{4,})-rank-(\d{4,}))\.npz")


class Held(NamedTuple):
    """The files of one save in a host's shared memory."""

    head: Head
    # Bytes of each file, by name
    files: dict[str, int]


class SnapshotFolder:
    """This host's folder for the snapshots of a checkpoint folder.

    Args:
        memory: this host's folder of the run.
        folder: the program's path of the checkpoint folder, the same on all ranks.
    """

    def __init__(self, memory: Path, folder: Path) -> None:
        self.path = memory / f"{zlib.crc32(os.fsencode(folder)):08x}"

    def make(self) -> None:
        """Create the folder, or check that only this user can enter it; lock it against sweeps.

        **Raises:** OSError; PermissionError if another user created it, or can enter it.
        """
        _hold(self.path.parent)
        os.close(open_private(self.path))

    def write(self, name: str, arrays: Mapping[str, np.ndarray]) -> int:
        """Write a file; return its bytes. **Raises:** OSError, after removing a partial file."""
        with self.writing(name) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type] # None is called allow_pickle
            file.flush()
            return os.fstat(file.fileno()).st_size

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a new file that no other user can read; it receives its name when complete.

        A partial file is removed after a failure.

        **Raises:** OSError; ValueError for a name that no file of a snapshot has.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"no file of a snapshot: {name!r}")
        folder, part = open_private(self.path), f".{name}.{secrets.token_hex(4)}.part"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            opened = os.open(part, flags, 0o600, dir_fd=folder)
            try:
                with os.fdopen(opened, "wb") as file:
                    yield file
                # By descriptors, because another user of /dev/shm could replace a folder between
                # two uses of its path
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
        finally:
            os.close(folder)

    def held(self) -> dict[int, Held]:
        """Return the intact files, by the number of the save. **Cost:** reads every file once."""
        names: dict[int, dict[str, int]] = {}
        heads: dict[int, Head] = {}
        for path in self._files():
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            number = int(match[1] or match[2])
            try:
                check_zip("A file of a snapshot", path, DELETE)
                if match[3]:
                    with arrays_in(path, "A rank's file of a snapshot", DELETE) as stored:
                        heads[number] = head_in(stored)
            except CheckpointError:
                path.unlink(missing_ok=True)  # Makes room for a copy, which another host may send
                continue
            names.setdefault(number, {})[path.name] = path.stat().st_size
        return {number: Held(head, names[number]) for number, head in heads.items()}

    def keep(self, saves: set[int], rank: int | None = None, models: bool = False) -> None:
        """Delete all files except those of `saves`.

        With `rank`, only that rank's files, with `models` also the models, and all older saves.
        """
        for path in self._files():
            match = _NAME.fullmatch(path.name)
            save = int(match[1] or match[2]) if match else -1
            belongs = rank is None
            if match is not None and rank is not None:
                # Older ones of any rank, because another number of ranks may have left them
                older = save < min(saves, default=0)
                belongs = older or (models if match[1] else int(match[3]) == rank)
            if belongs and save not in saves:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.path.iterdir()) if self.path.is_dir() else []


def needed(head: Head) -> list[str]:
    """Return the names of all files of a save."""
    ranks = [residuals_name(head.save, rank) for rank in range(head.ranks)]
    return [memory_model_name(head.save), *ranks]


def head_array(head: Head) -> np.ndarray:
    """Return a head as an array, to store in a file."""
    # Without NaN, as in checkpoint.json, because a head with NaN in its notes differs from itself
    return np.array(json_text(head._replace(older=())._asdict()))


def head_in(stored: Mapping[str, np.ndarray]) -> Head:
    """Return the head in the arrays of a file. **Raises:** as `head_of`."""
    return head_of(json.loads(str(stored["head"])))


def check_zip(kind: str, path: Path, remedy: str) -> None:
    """Compare the checksums in a zip file. **Raises:** CheckpointError for a damaged file."""
    with reading(kind, path, remedy, CheckpointError), zipfile.ZipFile(path) as file:
        if damaged := file.testzip():
            raise ValueError(f"a wrong checksum of {damaged}")


# Descriptors of the runs' folders, whose locks this process keeps until it ends
_held: dict[Path, int] = {}


def _hold(memory: Path) -> None:
    """Create the folder of a run, and lock it against the sweep of other runs."""
    before = _held.get(memory)
    if before is not None and is_still_at(memory, before):
        os.close(open_private(memory))  # Checks the owner again
        return
    # The kernel drops the shared lock when the process dies. A sweep removes only folders that it
    # can lock exclusively, which also protects processes that it cannot see, as in a container
    while True:
        opened = open_private(memory)
        fcntl.flock(opened, fcntl.LOCK_SH)
        if is_still_at(memory, opened):  # Otherwise a sweep has removed it meanwhile
            break
        os.close(opened)
    _held[memory] = opened
    if before is not None:
        os.close(before)
