"""Fills the slab: missing samples are read and decoded by several threads, and stored.

They come from the disk level or, if it does not have them, from the source.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tfcommx.data.batches import ABSENT, DAMAGED, FILLED_BY_OTHER
from tfcommx.data.disk import Disk
from tfcommx.data.options import Options
from tfcommx.data.pipeline import joined_at_exit
from tfcommx.data.slab import Slab
from tfcommx.data.sources.decode import JPEG, PNG, decode, pack
from tfcommx.data.sources.source import SampleError, Source

# Where `read_files` found a sample's file.
FROM_DISK, FROM_SOURCE = 1, 2


class Filler:
    """Brings missing samples into the slab, for one process.

    Every process fills what its own batches need. In the first epoch that is each sample once, and
    training already runs.

    Args:
        source: of the samples.
        slab: the node's memory.
        disk: the local disk level, or None.
        options: `store`; `on_error`: with "skip", a sample that cannot be read is left out of its
            batch and counted, else it is an error that names the file; without `partial`, the first
            sample that finds no room is announced by a warning.
        threads: that read and decode, >= 1.

    **Raises:** SampleError, from `fetch`, without "skip".
    """

    def __init__(
        self, source: Source, slab: Slab, disk: Disk | None, options: Options, threads: int
    ) -> None:
        self.source, self.slab, self.disk, self.store = source, slab, disk, options.store
        self.max_pixels = options.max_pixels
        self.skip, self.partial = options.on_error == "skip", options.partial
        # Epoch -> how many came from "disk" and "source", were "repaired" or "unreadable", or found
        # no room ("overflow").
        self.counts: dict[int, Counter[str]] = {}
        # Sample -> what was wrong.
        self.unreadable: dict[int, str] = {}
        self._lock = threading.Lock()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "tfcommx-fill")

    @joined_at_exit
    def read_files(
        self, samples: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the JPEGs and PNGs among a batch's absent samples, for the native fill.

        Everything else, errors included, is left to `fetch`.

        Args:
            samples: int64 [b].
            state: uint8 [b], of `batches.check`.

        Returns:
            Encoded bytes [b], empty for what is left to `fetch`; labels int64 [b]; level uint8 [b]:
            FROM_DISK, FROM_SOURCE or 0.
        """
        encoded = np.full(len(samples), b"", object)
        labels = np.zeros(len(samples), np.int64)
        level = np.zeros(len(samples), np.uint8)

        def bring(positions: np.ndarray) -> None:
            for i in positions.tolist():
                if found := self._file(int(samples[i])):
                    encoded[i], labels[i], level[i] = found

        if not self.slab.full:
            # A share per thread: a task per sample costs as much Python as its reading.
            absent = np.flatnonzero(state == ABSENT)
            shares = [absent[first :: self._threads] for first in range(self._threads)]
            list(self._pool.map(bring, shares))
        return encoded, labels, level

    def _file(self, sample: int) -> tuple[bytes, int, int] | None:
        """Return (encoded bytes, label, level) of a JPEG or PNG that is not in memory, or None."""
        # Another process was faster, or the sample cannot be read.
        if int(self.slab.index[sample]) != 0:
            return None
        try:
            kept = self.disk.read(sample) if self.disk is not None else None
            data, label = kept or self.source.read(sample)
        except (SampleError, OSError):
            return None
        if not isinstance(data, bytes) or not data.startswith((JPEG, PNG)):
            return None
        return data, label, FROM_DISK if kept else FROM_SOURCE

    @joined_at_exit
    def finish(
        self,
        samples: np.ndarray,
        state: np.ndarray,
        remaining: np.ndarray,
        epoch: int,
        encoded: np.ndarray,
        labels: np.ndarray,
        level: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count what the native fill has stored, keep it on disk, and `fetch` the rest.

        Args:
            samples: int64 [b].
            state: uint8 [b], of `batches.check`.
            remaining: uint8 [b], of `batches.fill`.
            epoch: that is charged.
            encoded: of `read_files`, as `labels` and `level`.

        Returns:
            As `fetch`.
        """
        brought = (remaining == 0) | (remaining == FILLED_BY_OTHER)
        for i in np.flatnonzero((state != 0) & brought).tolist():
            self._count(int(epoch), "disk" if level[i] == FROM_DISK else "source")
            # If another process was faster, it keeps the sample.
            if self.disk is not None and level[i] == FROM_SOURCE and remaining[i] == 0:
                self.disk.write(int(samples[i]), int(labels[i]), encoded[i])
        return self.fetch(samples, np.where(remaining == FILLED_BY_OTHER, 0, remaining), epoch)

    def fetch(
        self, samples: np.ndarray, state: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bring a batch's missing samples, of any kind.

        Args:
            samples: int64 [b].
            state: uint8 [b], of `batches.check`: 0 ready, 1 absent, 2 damaged.
            epoch: that is charged.

        Returns:
            The samples that can be read, int64 [b' <= b]; the records of those that found no room
            in the slab, uint8 [m]; and where each sample's begins in them, int64 [b'], -1 for those
            in the slab.
        """
        missing = np.flatnonzero(state)
        work = [(int(samples[i]), state[i] == DAMAGED, int(epoch)) for i in missing]
        records = list(self._pool.map(lambda args: self._bring(*args), work))
        at, loose, length = np.full(len(samples), -1, np.int64), [], 0
        keep = np.ones(len(samples), bool)
        for i, record in zip(missing, records, strict=True):
            if record is None:
                keep[i] = False
            elif record:
                at[i] = length
                loose.append(record)
                length += len(record)
        return samples[keep], np.frombuffer(b"".join(loose), np.uint8), at[keep]

    def _bring(self, sample: int, damaged: bool, epoch: int) -> bytes | None:
        """Bring one sample.

        Returns:
            b"" if it is in the slab now, its record if it found no room, None if it cannot be read.
        """
        if self.slab.unreadable(sample) and self.skip:
            self._count(epoch, "unreadable")
            return None
        if not damaged and self.slab.get(sample) is not None:  # Another process was faster
            return b""
        try:
            pixels, label, data = self._decoded(sample, epoch)
        except (SampleError, OSError) as error:
            self._give_up(sample, damaged, epoch, error)
            return None
        # Another process was faster after all.
        if not damaged and self.slab.get(sample) is not None:
            return b""
        if self.disk is not None and data is not None:
            self.disk.write(sample, label, data)
        if damaged:
            self._count(epoch, "repaired")
        put = self.slab.repair if damaged else self.slab.put
        if put(sample, label, pixels):
            return b""
        self._count(epoch, "overflow")
        self._warn_of_no_room()
        return pack(sample, label, pixels)

    def _decoded(self, sample: int, epoch: int) -> tuple[np.ndarray, int, bytes | None]:
        """Return pixels, label, and what the disk level lacks."""
        kept = self.disk.read(sample) if self.disk is not None else None
        if kept is not None:
            try:
                pixels = decode(kept[0], self.source.channels, self.store, self.max_pixels)
                self._count(epoch, "disk")
                return pixels, kept[1], None
            except SampleError:
                pass  # The source may have been fixed since
        data, label = self.source.read(sample)
        pixels = decode(data, self.source.channels, self.store, self.max_pixels)
        self._count(epoch, "source")
        return pixels, label, data if isinstance(data, bytes) else None

    def _give_up(self, sample: int, damaged: bool, epoch: int, error: Exception) -> None:
        """Raise for a sample that cannot be read; with `skip`, remember and count it."""
        if damaged:  # Otherwise a read that checks no CRC would serve it
            self.slab.forget(sample)
        message = f"Sample {sample} cannot be read: {self.source.where(sample)}: {error}."
        # A name that is no UTF-8 would empty the message in TensorFlow.
        message = message.encode("utf-8", "backslashreplace").decode()
        if not self.skip:
            raise SampleError(f"{message} Fix or remove it, or set on_error='skip'.") from error
        with self._lock:
            self.unreadable[sample] = message
        self._count(epoch, "unreadable")
        # What the system could not read now, it may read later.
        if isinstance(error, SampleError):
            self.slab.mark_unreadable(sample)

    def _warn_of_no_room(self) -> None:
        """Warn once that memory is too small, if that was not expected."""
        if self.partial:
            return
        self.partial = True
        warnings.warn(
            f"{self.slab.path} has no room for all samples, though it was made for them: others "
            "have filled the shared memory, or `reshuffle_fraction` is used without `reshuffle`. "
            "The rest is read and decoded in every epoch, which is slow.",
            stacklevel=3,
        )

    def _count(self, epoch: int, what: str) -> None:
        with self._lock:
            self.counts.setdefault(epoch, Counter())[what] += 1

    def close(self) -> None:
        """Let the threads end. May be called twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
