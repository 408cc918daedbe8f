"""The node's memory: decoded samples in one file of shared memory, one copy for all processes of a
node.

    page of header | index: int64 byte offset per sample (0 absent, -1 unreadable) | records at
    multiples of 64 bytes

A record is 64 bytes of header (see ops/kernels/slab.h) and the pixels. It is written with pwrite
(a full disk is an error there, and a fatal signal in a mapping; what the native fill does when
several write at once is in ops/kernels/fill_cpu.cc) and published by one aligned 8-byte store of
its offset, after it is whole. There are no locks on samples: two processes that write the same one
at the same moment write the same bytes twice, and a process killed in the middle has published
nothing. Only space is taken under a lock, for two microseconds, by who finds there that the sample
is absent still; it dies with its holder.

Every process that uses a slab holds a shared flock on it, which the kernel drops even at kill -9
and at the end of a boot: a slab that can be locked alone has no living owner. It is then removed,
never adopted.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tfcommx.terms import PlanError

MAGIC = b"TFCXSLB1"
PAGE = 4096
RECORD = 64
UNREADABLE = -1
_HEAD = struct.Struct("<8sqqqqqq")  # magic, count, index_at, data_at, length, next free byte, id
_NEXT = 40  # byte offset of the next free byte
_FACTS = 256  # byte offset of the JSON text
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_ENTRY = struct.Struct("<qqqiiiI")  # sample, label, bytes, height, width, channels, crc


class SlabError(RuntimeError):
    """A slab that cannot be made or used."""


def record_head(sample: int, label: int, pixels: np.ndarray) -> bytes:
    """Return the 64 bytes before the pixels, uint8 [h, w, c] and contiguous, of a sample."""
    head = struct.pack("<qqqiii", sample, label, pixels.nbytes, *pixels.shape)
    return head + struct.pack("<I24x", zlib.crc32(pixels, zlib.crc32(head)))


def pack(sample: int, label: int, pixels: np.ndarray) -> bytes:
    """Return the record of a sample (uint8 [h, w, c]), padded to a multiple of 64 bytes."""
    pixels = np.ascontiguousarray(pixels)
    return b"".join(
        (record_head(sample, label, pixels), pixels.data, bytes(-pixels.nbytes % RECORD))
    )


def record_bytes(pixel_bytes: int) -> int:
    """Return the bytes that a sample of so many bytes takes in a slab."""
    return RECORD + -(-pixel_bytes // RECORD) * RECORD


def overhead_bytes(count: int) -> int:
    """Return the bytes of a slab beside its records: header and index."""
    return PAGE + -(-8 * count // PAGE) * PAGE


@contextlib.contextmanager
def _locked(file: int):
    """Hold the file's allocation lock: of the open file, so that it is dropped at the holder's
    death and by no other close.
    """
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 8, 0)
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW, request)
    try:
        yield
    finally:
        fcntl.fcntl(
            file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 8, 0)
        )


def _alone(file: int) -> bool:
    """Try to lock the file alone; True where no other process uses it. A shared lock that was held
    is lost either way.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free(file: int) -> None:
    """Give back the memory of a slab but its header: a mapping that lives on, as TensorFlow's may,
    would keep it all.
    """
    length = os.fstat(file).st_size - PAGE
    # else it goes with the mappings
    ctypes.CDLL(None).fallocate(file, _PUNCH_HOLE, ctypes.c_long(PAGE), ctypes.c_long(length))


def _still_at(path: Path, file: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False


def _remove_if_unused(path: Path) -> bool:
    """Remove a slab without a living owner; True where it was removed."""
    try:
        file = os.open(path, os.O_RDWR)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        # who is not alone must not: the holder may have made a new one by now
        if _alone(file) and _still_at(path, file):
            path.unlink(missing_ok=True)
            return True
        return False
    finally:
        os.close(file)


def reclaim(folder: Path) -> list[Path]:
    """Remove all slabs, published or half made, in `folder` that no living process uses; return
    their paths.
    """
    found = [*folder.glob("tfcommx-*.slab"), *folder.glob("tfcommx-*.part")]
    return [path for path in sorted(found) if _remove_if_unused(path)]


def facts_of(path: Path) -> dict[str, Any]:
    """Read what a slab says about itself: key, source, pid, created; an empty dict where it says
    nothing legible.
    """
    try:
        with path.open("rb") as file:
            page = file.read(PAGE)
        return json.loads(page[_FACTS:].split(b"\0", 1)[0]) if page[:8] == MAGIC else {}
    except (OSError, ValueError):
        return {}


def reserved_bytes(path: Path) -> int:
    """Return the bytes that a slab is still to take: of its fact `need` where it has one, else of
    its length; 0 where it is gone.
    """
    try:
        with path.open("rb") as file:
            magic, *_, length, used, _ = _HEAD.unpack(file.read(_HEAD.size))
    except (OSError, struct.error):
        return 0
    return max(0, int(facts_of(path).get("need", length)) - used) if magic == MAGIC else 0


def state_of(path: Path) -> tuple[int, int, int, bool]:
    """Return (samples of the data set, samples that are present, bytes given out, is a living
    process using it) of a slab.

    **Raises:** SlabError where the file is no slab.
    """
    with path.open("rb") as file:
        page = file.read(_HEAD.size)
        if len(page) < _HEAD.size or page[: len(MAGIC)] != MAGIC:
            raise SlabError(f"{path} is no slab. Remove it by hand if nothing needs it.")
        _, count, index_at, _, _, used, _ = _HEAD.unpack(page)
        index = np.fromfile(path, np.int64, count, offset=index_at)
        return count, int(np.count_nonzero(index > 0)), used, not _alone(file.fileno())


class Slab:
    """One process's hold on the slab of its node.

    Args:
      folder: of shared memory, usually /dev/shm.
      name: of the file, without its ending; the same on all processes of the node.
      key: hash of the contents; a living slab of this name with another key is refused.
      count: samples of the data set, >= 0.
      length: gives the bytes of the file, or refuses; asked only where the slab does not exist.
          Memory is taken as it fills.
      facts: strings for `facts_of`.
    **Ranks:** every process of a node calls it, in any order and at any time; the first makes the
    slab.
    **Raises:** SlabError where the folder cannot be written, or a living slab has another key.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        key: str,
        count: int,
        length: Callable[[], int],
        facts: dict[str, str] | None = None,
    ) -> None:
        self.path = Path(folder) / f"{name}.slab"
        self.created = False
        self._owner = os.getpid()
        try:
            self.file = self._attach_or_make(key, count, length, facts or {})
        except OSError as error:
            raise SlabError(
                f"A slab cannot be made in {folder}: {error}. Give `memory` a folder of shared "
                "memory that can be written "
                "and has room, usually /dev/shm."
            ) from error
        self._map = mmap.mmap(self.file, 0)
        magic, self.count, index_at, self.data_at, self.length, _, self.id = _HEAD.unpack_from(
            self._map, 0
        )
        if magic != MAGIC or self.count != count or facts_of(self.path).get("key") != key:
            found = facts_of(self.path).get("key")
            self.close()
            raise SlabError(
                f"{self.path} is in use with other contents: key {key} is required, found {found}. "
                "Give the runs different `memory` folders."
            )
        self.index = np.frombuffer(self._map, np.int64, count, index_at)
        # opens this file, and no other that has taken its path; the ops check the id too
        self.door = f"/proc/self/fd/{self.file}"
        self._lock = threading.Lock()
        self.full = False

    def _attach_or_make(
        self, key: str, count: int, length: Callable[[], int], facts: dict[str, str]
    ) -> int:
        while True:
            _remove_if_unused(self.path)
            try:
                file = os.open(self.path, os.O_RDWR)
            except FileNotFoundError:
                made = self._make(key, count, length(), facts)
                if made is not None:
                    self.created = True
                    return made
                continue
            fcntl.flock(file, fcntl.LOCK_SH)
            if _still_at(self.path, file):
                return file
            os.close(file)

    def _make(self, key: str, count: int, length: int, facts: dict[str, str]) -> int | None:
        """Make the slab under another name, then publish it; None where another process was
        first.
        """
        part = self.path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.part")
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            data_at = overhead_bytes(count)
            length = max(length, data_at)
            os.ftruncate(file, length)
            os.posix_fallocate(file, 0, data_at)
            text = json.dumps(
                {"key": key, "pid": os.getpid(), "created": time.time(), **facts}
            ).encode()
            if len(text) >= PAGE - _FACTS:
                raise PlanError(
                    f"The facts of a slab must fit {PAGE - _FACTS} bytes. Received {len(text)}."
                )
            os.pwrite(
                file,
                _HEAD.pack(MAGIC, count, PAGE, data_at, length, data_at, secrets.randbits(63)),
                0,
            )
            os.pwrite(file, text + b"\0", _FACTS)
            # fails where the name is taken; a rename would replace the other's
            os.link(part, self.path)
            return file
        except (FileExistsError, FileNotFoundError):
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        finally:
            part.unlink(missing_ok=True)

    def _take(self, size: int, unless: int | None = None) -> int | None:
        """Return where `size` bytes, a multiple of 64, may be written; None where the slab is full,
        0 where sample `unless` is there.
        """
        with self._lock, _locked(self.file):
            if unless is not None and self.get(unless) is not None:
                return 0
            at = struct.unpack_from("<q", self._map, _NEXT)[0]
            if self.length - at < size:
                self.full = True
                return None
            struct.pack_into("<q", self._map, _NEXT, at + size)
        return at

    def _write(self, sample: int, label: int, pixels: np.ndarray, at: int) -> bool:
        pixels = np.ascontiguousarray(pixels)
        try:  # without a copy of the pixels
            return (
                os.pwritev(self.file, [record_head(sample, label, pixels), pixels], at)
                == RECORD + pixels.nbytes
            )
        except OSError:  # the file system is full
            return False

    def put(self, sample: int, label: int, pixels: np.ndarray, place: int | None = None) -> bool:
        """Write and publish a sample, uint8 [h, w, c]; False where there is no room for it (`full`
        is then set).

        Args:
          place: where there is room for it, such as one of `holes`; None: in new room, unless
              another process has put it there.
        """
        at = self._take(record_bytes(pixels.nbytes), sample) if place is None else place
        return at == 0 or self._publish(sample, label, pixels, at)

    def _publish(self, sample: int, label: int, pixels: np.ndarray, at: int | None) -> bool:
        if at is None or not self._write(sample, label, pixels, at):
            self.full = True
            return False
        self.index[sample] = at
        return True

    def holes(self) -> list[tuple[int, int]]:
        """Return (bytes, byte offset) of the room between the samples that are present, ascending:
        who was there has left.

        Only while nobody fills: what another process is writing looks free.
        """
        starts = np.sort(self.index)
        starts = starts[
            (starts >= self.data_at) & (starts <= self.length - RECORD) & (starts % RECORD == 0)
        ]
        # of the pixels: see `record_head`
        sizes = np.frombuffer(self._map, np.int64, self.length // 8)[(starts + 16) // 8]
        ends = np.maximum.accumulate(
            np.append(self.data_at, starts + RECORD - -sizes // RECORD * RECORD)
        )
        rooms = np.append(starts, self.used_bytes) - ends
        return sorted(
            (int(room), int(at)) for room, at in zip(rooms, ends, strict=True) if room > 0
        )

    def repair(self, sample: int, label: int, pixels: np.ndarray) -> bool:
        """Write a sample again whose CRC does not hold: in its place where its size is legible, so
        that it is never absent.

        False where there is no room for it: it is unpublished then.
        """
        held = self.get(sample)
        if held is None or held[0].nbytes != pixels.nbytes:
            done = self._publish(sample, label, pixels, self._take(record_bytes(pixels.nbytes)))
        else:
            done = self._write(sample, label, pixels, int(self.index[sample]))
        if not done:
            self.forget(sample)
        return done

    def get(self, sample: int) -> tuple[np.ndarray, int] | None:
        """Return (a view of the pixels uint8 [h, w, c], label), or None where the sample is
        absent.
        """
        at = int(self.index[sample])
        if at < self.data_at or at % RECORD or at > self.length - RECORD:
            return None
        found, label, size, height, width, channels, _ = _ENTRY.unpack_from(self._map, at)
        if (
            found != sample
            or min(height, width, channels) < 1
            or size != height * width * channels
            or at + RECORD + size > self.length
        ):
            return None
        return np.frombuffer(self._map, np.uint8, size, at + RECORD).reshape(
            height, width, channels
        ), label

    def intact(self, sample: int) -> bool:
        """Does the CRC of a sample that is present hold? One pass over its bytes."""
        got = self.get(sample)
        at = int(self.index[sample])
        return (
            got is not None
            and zlib.crc32(got[0].data, zlib.crc32(self._map[at : at + 36]))
            == _ENTRY.unpack_from(self._map, at)[-1]
        )

    def mark_unreadable(self, sample: int) -> None:
        """Say that no level can give this sample, so that nobody tries again."""
        self.index[sample] = UNREADABLE

    def unreadable(self, sample: int) -> bool:
        """Has the sample been marked as one that no level can give?"""
        return int(self.index[sample]) == UNREADABLE

    def forget(self, sample: int) -> None:
        """Unpublish a sample. Its bytes stay where they are."""
        self.index[sample] = 0

    @property
    def filled(self) -> int:
        """Number of samples that are present."""
        return int(np.count_nonzero(self.index > 0))

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that have been given out."""
        return struct.unpack_from("<q", self._map, _NEXT)[0]

    def close(self) -> None:
        """Let go; the last process of the node to do so removes the slab and frees its memory. May
        be called twice.

        Mappings stay valid, views of `get` too, but then all samples are absent and all pixels 0. A
        forked child closes its descriptor only: the slab stays its parent's.
        """
        if self.file < 0:
            return
        # a forked child has the same lock: to lock alone would succeed, to unlock be for both
        if os.getpid() == self._owner:
            if _alone(self.file) and _still_at(self.path, self.file):
                _free(self.file)
                self.path.unlink(missing_ok=True)
            # the mapping has a duplicate of the descriptor, which would keep the lock
            fcntl.flock(self.file, fcntl.LOCK_UN)
        os.close(self.file)
        self.file = -1


def pss_bytes(path: Path) -> int:
    """Return this process's proportional share of the memory that is mapped from `path` (PSS), in
    bytes.

    The shares of all processes add up to the memory of the node. **Source:** proc(5), smaps.
    """
    facts = os.stat(path)  # not its name: the process that made the slab mapped it under another
    file = [f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}", str(facts.st_ino)]
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.split()[3:5] == file
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total
