"""The node's memory: decoded samples in a file of shared memory, one copy for all its processes.

    page of header | index: int64 byte offset per sample (0 absent, -1 unreadable) | records at
    multiples of 64 bytes

Samples need no locks, because two processes that write the same sample write the same bytes twice,
and a process killed during a write has published nothing. Only the allocation of space holds a
lock, for two microseconds, which is released if its holder dies.
"""

import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tfcommx.core.files import is_still_at
from tfcommx.data.slab_files import (
    NEXT_AT,
    SlabError,
    allocation_lock,
    free_memory,
    metadata_of,
    open_or_create,
    read_header,
    try_exclusive_lock,
)
from tfcommx.data.sources.decode import HEAD, RECORD, record_bytes, record_head

# Index entry of a sample that neither disk nor source can return
UNREADABLE = -1


class Slab:
    """One process's access to the slab of its node.

    Args:
        path: path of the file, in shared memory, ending with `.slab`; the same on all processes of
            the node.
        key: hash of the contents; a slab in use at this path with another key is refused.
        count: number of samples of the data set, >= 0.
        length: function that returns the bytes of the file, or raises; called only if there is no
            slab yet. Memory is taken as it fills.
        metadata: strings for `read_metadata`.

    **Ranks:** every process of a node creates one, in any order and at any time; the first one
    creates the file.
    **Raises:** SlabError if the folder cannot be written, or a slab in use has another key.
    """

    def __init__(
        self,
        path: str | Path,
        key: str,
        count: int,
        length: Callable[[], int],
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._owner = os.getpid()
        metadata = {} if metadata is None else metadata
        try:
            self.file, self.created = open_or_create(self.path, key, count, length, metadata)
        except OSError as error:
            raise SlabError(
                f"A slab cannot be made in {self.path.parent}: {error}. Give `memory` a folder of "
                "shared memory that can be written and has room, usually /dev/shm."
            ) from error
        # Read once, because later writes of another process must not be trusted
        header = read_header(self.file)
        held = metadata_of(self.file).get("key") if header else "a damaged header"
        if header is None or header.samples != count or held != key:
            self.close()
            raise SlabError(
                f"{self.path} is in use with other contents: key {key} is required, found {held}. "
                "Give the runs different `memory` folders."
            )
        self.count, self.data_at, self.length = header.samples, header.data_at, header.length
        self.id = header.id
        self._map = mmap.mmap(self.file, self.length)
        self.index = np.frombuffer(self._map, np.int64, count, header.index_at)
        # Opens this file even if another one has taken its path; the ops check the id too
        self.descriptor_path = f"/proc/self/fd/{self.file}"
        self._lock = threading.Lock()
        self.full = False

    def _take(self, size: int, unless: int | None = None) -> int | None:
        """Allocate `size` bytes, a multiple of 64.

        Returns:
            Their byte offset; None if the slab is full, 0 if the sample `unless` is present.
        """
        with self._lock, allocation_lock(self.file):
            # Within the lock, because another process may have stored the sample since the caller
            # looked, and the sample would take space twice
            if unless is not None and self.get(unless) is not None:
                return 0
            at = self.used_bytes
            # Checked because a damaged value would lead outside the records
            is_sound = self.data_at <= at <= self.length and at % RECORD == 0
            if not is_sound or self.length - at < size:
                self.full = True
                return None
            # A process that is killed before it publishes loses this space, until `holes` finds it
            struct.pack_into("<q", self._map, NEXT_AT, at + size)
        return at

    def _write(self, sample: int, label: int, pixels: np.ndarray, at: int) -> bool:
        """Write a record; False if the file system is full."""
        pixels = np.ascontiguousarray(pixels)
        head = record_head(sample, label, pixels)
        # Not through the mapping, where a full file system would be a fatal signal in place of an
        # error (ops/kernels/fill_cpu.cc explains how the native fill writes)
        try:  # without a copy of the pixels
            return os.pwritev(self.file, [head, pixels.data], at) == RECORD + pixels.nbytes
        except OSError:
            return False

    def put(self, sample: int, label: int, pixels: np.ndarray, at: int | None = None) -> bool:
        """Write and publish a sample, uint8 [h, w, c]; if it does not fit, return False.

        Args:
            at: byte offset of free space, such as one of `holes`. None: newly allocated space,
                unless another process has stored the sample in the meantime.
        """
        if at is None:
            at = self._take(record_bytes(pixels.nbytes), sample)
        return at == 0 or self._publish(sample, label, pixels, at)

    def _publish(self, sample: int, label: int, pixels: np.ndarray, at: int | None) -> bool:
        if at is None or not self._write(sample, label, pixels, at):
            self.full = True
            return False
        self.index[sample] = at  # One aligned store of 8 bytes publishes the complete record
        return True

    def holes(self) -> list[tuple[int, int]]:
        """Return (bytes, byte offset) of each free space between the samples, ascending.

        Call it only while no process fills, because the record of a running write looks free.
        """
        starts = np.sort(self.index)
        starts = starts[
            (starts >= self.data_at) & (starts <= self.length - RECORD) & (starts % RECORD == 0)
        ]
        # Bytes of the pixels, at byte 16 of a record
        sizes = np.frombuffer(self._map, np.int64, self.length // 8)[(starts + 16) // 8]
        # Ascending, so that a record with a damaged size opens no hole over the records behind it
        ends = np.maximum.accumulate(
            np.append(self.data_at, starts + RECORD - -sizes // RECORD * RECORD)
        )
        rooms = np.append(starts, self.used_bytes) - ends
        return sorted(
            (int(room), int(at)) for room, at in zip(rooms, ends, strict=True) if room > 0
        )

    def repair(self, sample: int, label: int, pixels: np.ndarray) -> bool:
        """Write a sample with a wrong CRC again; if it does not fit, unpublish it, return False.

        If its size is readable, the new record overwrites the damaged one, so that the sample is
        never absent.
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
        """Return (a view of the pixels uint8 [h, w, c], label); None if the sample is absent."""
        at = int(self.index[sample])
        # Each value is checked, because a damaged index or header must not lead out of the mapping
        if at < self.data_at or at % RECORD or at > self.length - RECORD:
            return None
        stored_sample, label, size, *shape, _ = HEAD.unpack_from(self._map, at)
        height, width, channels = shape
        if (
            stored_sample != sample
            or min(shape) < 1
            or size != height * width * channels
            or at + RECORD + size > self.length
        ):
            return None
        return np.frombuffer(self._map, np.uint8, size, at + RECORD).reshape(shape), label

    def intact(self, sample: int) -> bool:
        """Return True if a sample is present and its CRC is right. One pass over its bytes."""
        got = self.get(sample)
        if got is None:
            return False
        at = int(self.index[sample])
        crc = zlib.crc32(got[0].data, zlib.crc32(self._map[at : at + 36]))
        return bool(crc == HEAD.unpack_from(self._map, at)[-1])

    def mark_unreadable(self, sample: int) -> None:
        """Mark a sample that neither disk nor source can return; no process tries again."""
        self.index[sample] = UNREADABLE

    def unreadable(self, sample: int) -> bool:
        """Return True if a sample has been marked by `mark_unreadable`."""
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
        """Allocated bytes of the file."""
        return int(struct.unpack_from("<q", self._map, NEXT_AT)[0])

    def close(self) -> None:
        """Close the slab; the last process of the node removes the slab and frees its memory.

        May be called twice. Mappings and views of `get` stay valid, but once the slab is removed
        all samples are absent and all pixels 0.
        """
        if self.file < 0:
            return
        # Not in a forked child, because it shares the lock: an exclusive lock would succeed there,
        # and an unlock would release both
        if os.getpid() == self._owner:
            if try_exclusive_lock(self.file) and is_still_at(self.path, self.file):
                free_memory(self.file)
                self.path.unlink(missing_ok=True)
            # Unlocked explicitly, because the mapping has a duplicate of the descriptor
            fcntl.flock(self.file, fcntl.LOCK_UN)
        os.close(self.file)
        self.file = -1
