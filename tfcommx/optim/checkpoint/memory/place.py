"""The folder in a host's shared memory that holds the snapshots of one checkpoint folder.

    /dev/shm/tfcommx-1000-5f0c..-node1/6b1d93aa/        mode 0700
      model-0040.npz                      of save 40: weights and optimizers' state; one a host
      residuals-0040-rank-0002.npz        what rank 2 alone has, and the head of the save
      residuals-0040-rank-0006.npz        the same of a rank on the host before: a mirror

A file has its name when it is whole; the checksums of its arrays are in it (a zip file has them).
"""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from tfcommx.comm.private_folder import private_folder
from tfcommx.optim.checkpoint.files import Head, head_of, memory_model_name, residuals_name

_NAME = re.compile(r"(?:model-(\d{4,})|residuals-(\d{4,})-rank-(\d{4,}))\.npz")


class Held(NamedTuple):
    """What a host's shared memory has of one save."""

    head: Head
    # Bytes of each file, by name
    files: dict[str, int]


class Place:
    """This host's folder for the snapshots of a checkpoint folder.

    Args:
        memory: this host's folder of the run.
        folder: as the program calls the checkpoint folder, the same on all ranks.
    """

    def __init__(self, memory: Path, folder: Path) -> None:
        self.path = memory / f"{zlib.crc32(str(folder).encode()):08x}"

    def make(self) -> None:
        """Make the folder. **Raises:** OSError, also if another user has made it before."""
        private_folder(self.path.parent)
        private_folder(self.path)

    def write(self, name: str, arrays: Mapping[str, np.ndarray]) -> int:
        """Write a file; return its bytes. **Raises:** OSError; then nothing is left of it."""
        part = self.part(name)
        try:
            with self.open_part(name) as file:
                np.savez(file, **arrays)
            size = part.stat().st_size
            part.rename(self.path / name)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return size

    def part(self, name: str) -> Path:
        """Return what a file is called until it is whole. **Raises:** ValueError for no name."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"no file of a snapshot: {name!r}")
        return self.path / f".{name}.part"

    def open_part(self, name: str) -> IO[bytes]:
        """Begin a file that nobody else can read. **Raises:** OSError; ValueError for no name."""
        return open(self.part(name), "wb", opener=lambda path, flags: os.open(path, flags, 0o600))

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
            if not _intact(path):
                path.unlink(missing_ok=True)
                continue
            number = int(found[1] or found[2])
            names.setdefault(number, {})[path.name] = path.stat().st_size
            if found[3]:
                heads[number] = read_head(path)
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


def read_head(path: Path) -> Head:
    """Return the head in a rank's file."""
    with np.load(path) as stored:
        found: dict[str, Any] = json.loads(str(stored["head"]))
    return head_of(found)


def _intact(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
