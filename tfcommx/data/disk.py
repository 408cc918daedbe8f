"""The disk level of the cache: encoded bytes as the source returned them, kept from run to run.

Each data set has a folder. In it, each process that wrote has a pack (the bytes, concatenated) and
its index (32 bytes per sample). A process appends only to its own files, and writes the bytes
first. A kill therefore leaves at worst bytes without an entry or half an entry, which are not read.
Every read is checked against its CRC.

A CRC is no signature: a user who can write these files can choose the pictures of a training.
Therefore each user of a machine has separate folders, without rights for others, and other folders
and files are ignored.
"""

import contextlib
import os
import secrets
import shutil
import struct
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np

from tfcommx.core.files import is_own_folder, opened_own
from tfcommx.data.slab_files import prefix

# Entry of an index: the position of a sample in the pack
_ENTRY = np.dtype(
    [("sample", "<i8"), ("label", "<i8"), ("at", "<i8"), ("length", "<i4"), ("crc", "<u4")]
)
# Smallest interval between two reads of the other processes' entries, in seconds
_REFRESH_S = 1.0


def _crc(sample: int, label: int, data: bytes) -> int:
    # With number and label, because a damaged index could pair the bytes with another label
    return zlib.crc32(data, zlib.crc32(struct.pack("<qq", sample, label)))


class Disk:
    """One process's access to the disk level of a data set.

    After the first failure to write, which causes a warning, nothing more is written, but the
    samples in the folder are still served. A folder of another user, or that others can write to,
    is not used at all. `corrupt` counts reads with a wrong CRC.
    """

    def __init__(self, folder: str | Path, key: str, count: int) -> None:
        self.folder = Path(folder) / f"{prefix()}{key[:32]}"
        self.corrupt = 0
        self.write_error: str | None = None
        self._lock = threading.Lock()
        # Opened for each read, because many runs leave more packs than a process may have open
        self._packs: list[Path] = []
        # Index file -> (number of its pack, number of entries read)
        self._indices: dict[Path, tuple[int, int]] = {}
        self._pack_of = np.full(count, -1, np.int32)
        self._entry_of = np.zeros(count, _ENTRY)
        # Descriptors of this process's pack and index
        self._out: tuple[int, int] | None = None
        self._end, self._owner = 0, os.getpid()
        self._looked = -_REFRESH_S
        self._refresh()

    def _refresh(self) -> None:
        if time.monotonic() - self._looked < _REFRESH_S:
            return
        self._looked = time.monotonic()
        if not is_own_folder(self.folder):
            return
        indices = []
        for path in self.folder.glob("*.idx"):
            with contextlib.suppress(OSError):  # Dropped in the meantime
                indices.append((path.lstat().st_mtime_ns, path))
        # In order of age, because a later entry replaces a damaged one
        for _, path in sorted(indices):
            pack, seen = self._indices.get(path, (len(self._packs), 0))
            try:
                entries = _entries(path, seen)
                if not len(entries):
                    continue
            except OSError:  # Dropped in the meantime, or another user's
                continue
            if pack == len(self._packs):
                self._packs.append(path.with_suffix(".pack"))
            self._indices[path] = (pack, seen + len(entries))
            # A damaged entry may name any sample; its CRC is checked when the sample is read
            entries = entries[(entries["sample"] >= 0) & (entries["sample"] < len(self._pack_of))]
            self._entry_of[entries["sample"]] = entries
            self._pack_of[entries["sample"]] = pack

    def __len__(self) -> int:
        """Return the number of kept samples that this process knows."""
        return int(np.count_nonzero(self._pack_of >= 0))

    def read(self, sample: int) -> tuple[bytes, int] | None:
        """Return (encoded bytes, label); None if the sample is not kept or its CRC is wrong."""
        with self._lock:
            if self._pack_of[sample] < 0:
                self._refresh()
            pack = int(self._pack_of[sample])
            if pack < 0:
                return None
            _, label, at, length, crc = self._entry_of[sample].tolist()
        try:
            with opened_own(self._packs[pack]) as file:
                size = os.fstat(file).st_size
                # An entry of a damaged index may point beyond the end
                data = os.pread(file, length, at) if 0 <= at <= size - length <= size else b""
        except OSError:  # Dropped in the meantime, or another user's
            return None
        if len(data) == length and _crc(sample, label, data) == crc:
            return data, label
        with self._lock:
            self.corrupt += 1
            # The next read takes the sample from the source, and writes it again: the later entry
            # replaces this one
            self._pack_of[sample] = -1
        return None

    def write(self, sample: int, label: int, data: bytes) -> None:
        """Write a sample, unless a write has failed before."""
        with self._lock:
            if self.write_error is not None:
                return
            try:
                # A forked process would write over the samples of its parent
                if self._out is None or self._owner != os.getpid():
                    self._out, self._end, self._owner = self._create(), 0, os.getpid()
                pack, index = self._out
                entry = np.array(
                    (sample, label, self._end, len(data), _crc(sample, label, data)), _ENTRY
                ).tobytes()
                written = os.pwrite(pack, data, self._end)
                if written != len(data) or os.write(index, entry) != len(entry):
                    raise OSError("no space left on the device")
                self._end += len(data)
            except OSError as error:
                self.write_error = str(error)
                warnings.warn(
                    f"The disk level {self.folder} takes no more samples: {error}. Training "
                    "continues; the next run will read more from the source. Give `disk` a folder "
                    "with room that can be written.",
                    stacklevel=2,
                )

    def _create(self) -> tuple[int, int]:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(0o700)
        if not is_own_folder(self.folder):
            raise OSError(f"{self.folder} is another user's, or others can write to it")
        stem = self.folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        pack = os.open(stem.with_suffix(".pack"), flags, 0o600)
        return pack, os.open(stem.with_suffix(".idx"), flags | os.O_APPEND, 0o600)

    def close(self) -> None:
        """Close the files. May be called twice."""
        with self._lock:
            files, self._out = self._out or (), None
            # Threads that still run then find no sample here, and write none
            self._pack_of[:] = -1
            self.write_error = self.write_error or "closed"
        for file in files:
            with contextlib.suppress(OSError):
                os.close(file)


def _entries(path: Path, seen: int) -> np.ndarray:
    """Return the complete entries of an index after the first `seen`."""
    with opened_own(path) as file:
        # Its writer may be in the middle of an entry, which is then read at the next look
        data = os.pread(file, os.fstat(file).st_size, seen * _ENTRY.itemsize)
    return np.frombuffer(data[: len(data) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)


def _folders(folder: str | Path) -> list[Path]:
    return [path for path in sorted(Path(folder).glob(f"{prefix()}*")) if is_own_folder(path)]


def usage(folder: str | Path) -> list[tuple[Path, int, int]]:
    """Return (folder, samples with repetitions, bytes) of this user's data sets below `folder`."""
    rows = []
    for data_set in _folders(folder):
        sizes = {}
        with contextlib.suppress(OSError):  # Dropped in the meantime
            for path in data_set.iterdir():
                with contextlib.suppress(OSError):
                    sizes[path] = path.lstat().st_size
        entries = sum(
            size // _ENTRY.itemsize for path, size in sizes.items() if path.suffix == ".idx"
        )
        rows.append((data_set, entries, sum(sizes.values())))
    return rows


def drop(folder: str | Path) -> list[Path]:
    """Remove every data set of this user below `folder`; return their folders.

    Processes that use them continue with the source.
    """
    dropped = []
    for path in _folders(folder):
        # Under another name first, because a process may write into the folder, or drop it, too
        removed = path.with_name(f"{path.name}-removed-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(removed)
            shutil.rmtree(removed)
            dropped.append(path)
    return dropped
