"""Samples that are not in memory: fetched from the disk or the source, decoded by several threads,
put into the slab.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tfcommx.data.cache.disk import Disk
from tfcommx.data.cache.slab import Slab, pack
from tfcommx.data.sources.base import JPEG, PNG, SampleError, Source, decode

EXIT_SECONDS = 5  # that the end of a process waits for samples that are being read
# what `augment.check` says of a sample that is not there, and of one whose CRC does not hold
ABSENT, CORRUPT = 1, 2
THERE = 3  # what `augment.fill` says of one that another process has put there meanwhile

_calls = threading.Condition()
_inside = 0  # calls of TensorFlow's threads that are under way
_ended = False


def until_exit(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work` for TensorFlow's threads: at the end of the process those under way are waited
    for, and others raise.

    A thread that came to Python later would stop there for good, and with it the end of its
    pipeline, so that of the process.
    """

    @functools.wraps(work)
    def call(*args: Any) -> Any:
        global _inside
        with _calls:
            if _ended:
                raise RuntimeError("The process ends.")
            _inside += 1
        try:
            return work(*args)
        finally:
            with _calls:
                _inside -= 1
                _calls.notify_all()

    return call


def _end() -> None:
    global _ended
    with _calls:
        _ended = True
        _calls.wait_for(lambda: not _inside, EXIT_SECONDS)
    # they return through TensorFlow, and those that raise fill the pipeline's queue
    time.sleep(0.1)


def _forget_calls() -> None:
    """In a forked child there are none of the threads whose calls are under way here."""
    global _calls, _inside
    _calls, _inside = threading.Condition(), 0


os.register_at_fork(after_in_child=_forget_calls)
# before the pools end, which calls under way need; `atexit` would come after
threading._register_atexit(_end)


class Filler:
    """Brings missing samples into the slab, for one process.

    Every process fills what its own batches need. In the first epoch that is each sample once, and
    training already runs.

    Args:
      skip: a sample that cannot be read is left out of its batch, and counted; else it is an error
          that names the file.
      partial: that samples find no room is no surprise; else the first one is announced by a
          warning.
      threads: that read and decode, >= 1.
    **Raises:** SampleError, from `fetch`, without `skip`.
    """

    def __init__(
        self,
        source: Source,
        slab: Slab,
        disk: Disk | None,
        store: int | None,
        skip: bool,
        partial: bool,
        threads: int,
    ) -> None:
        self.source, self.slab, self.disk, self.store, self.skip, self.partial = (
            source,
            slab,
            disk,
            store,
            skip,
            partial,
        )
        # per epoch: disk, source, repaired, unreadable, overflow
        self.counts: dict[int, Counter[str]] = {}
        self.unreadable: dict[int, str] = {}  # sample -> what was wrong
        self._lock = threading.Lock()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "tfcommx-fill")

    @until_exit
    def read(
        self, samples: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the JPEGs and PNGs among a batch's absent samples, for the native fill. All else is
        left to `fetch`, errors too.

        Returns:
          encoded bytes [b], empty where they are left; labels int64 [b]; level uint8 [b]: 1 disk, 2
          source.
        """
        encoded, labels, level = (
            np.full(len(samples), b"", object),
            np.zeros(len(samples), np.int64),
            np.zeros(len(samples), np.uint8),
        )

        def bring(places: np.ndarray) -> None:
            for i in places.tolist():
                sample = int(samples[i])
                # another process was faster, or it cannot be read
                if int(self.slab.index[sample]) != 0:
                    continue
                try:
                    kept = self.disk.read(sample) if self.disk is not None else None
                    data, label = kept or self.source.read(sample)
                except (SampleError, OSError):
                    continue
                if isinstance(data, bytes) and data.startswith((JPEG, PNG)):
                    encoded[i], labels[i], level[i] = data, label, 1 if kept else 2

        if not self.slab.full:
            # a share per thread: a task per sample costs as much Python as its reading
            absent = np.flatnonzero(state == ABSENT)
            list(
                self._pool.map(
                    bring, [absent[first :: self._threads] for first in range(self._threads)]
                )
            )
        return encoded, labels, level

    @until_exit
    def settle(
        self,
        samples: np.ndarray,
        state: np.ndarray,
        left: np.ndarray,
        epoch: int,
        encoded: np.ndarray,
        labels: np.ndarray,
        level: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count and keep on disk what the native fill has put into the slab, and `fetch` what it
        has left.

        Args:
          left: uint8 [b], of `augment.fill`. The others: of `read`, or its arguments.
        """
        for i in np.flatnonzero((state != 0) & ((left == 0) | (left == THERE))).tolist():
            self._count(int(epoch), "disk" if level[i] == 1 else "source")
            # else whoever was faster does
            if self.disk is not None and level[i] == 2 and left[i] == 0:
                self.disk.write(int(samples[i]), int(labels[i]), encoded[i])
        return self.fetch(samples, np.where(left == THERE, 0, left), epoch)

    def fetch(
        self, samples: np.ndarray, state: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bring a batch's missing samples, of any kind.

        Args:
          samples: int64 [b].
          state: uint8 [b], of `augment.check`: 0 ready, 1 absent, 2 damaged.
          epoch: that is charged.
        Returns:
          The samples that can be read, int64 [b' <= b]; the records of those that found no room in
          the slab, uint8 [m]; and where each sample's begins in them, int64 [b'], -1 for those in
          the slab.
        """
        missing = np.flatnonzero(state)
        work = [(int(samples[i]), state[i] == CORRUPT, int(epoch)) for i in missing]
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
        """Return b"" where the sample is in the slab now, its record where it found no room, None
        where it cannot be read.
        """
        if self.slab.unreadable(sample) and self.skip:
            self._count(epoch, "unreadable")
            return None
        if not damaged and self.slab.get(sample) is not None:  # another process was faster
            return b""
        try:
            pixels, label, data = self._decoded(sample, epoch)
        except (SampleError, OSError) as error:
            if damaged:  # or a read that checks no CRC would serve it
                self.slab.forget(sample)
            message = f"Sample {sample} cannot be read: {self.source.where(sample)}: {error}."
            # a name that is no UTF-8 would empty it in TensorFlow
            message = message.encode("utf-8", "backslashreplace").decode()
            if not self.skip:
                raise SampleError(
                    f"{message} Mend or remove it, or set on_error='skip'."
                ) from error
            with self._lock:
                self.unreadable[sample] = message
            self._count(epoch, "unreadable")
            # what the system could not read now, it may read later
            if isinstance(error, SampleError):
                self.slab.mark_unreadable(sample)
            return None
        # another process was faster after all
        if not damaged and self.slab.get(sample) is not None:
            return b""
        if self.disk is not None and data is not None:
            self.disk.write(sample, label, data)
        if damaged:
            self._count(epoch, "repaired")
        if (
            self.slab.repair(sample, label, pixels)
            if damaged
            else self.slab.put(sample, label, pixels)
        ):
            return b""
        self._count(epoch, "overflow")
        if not self.partial:
            self.partial = True
            warnings.warn(
                f"{self.slab.path} has no room for all samples, though it was made for them: "
                "others have filled the shared memory, or "
                "parts are exchanged without `swap`. The rest is read and decoded in every "
                "epoch, which is slow.",
                stacklevel=2,
            )
        return pack(sample, label, pixels)

    def _decoded(self, sample: int, epoch: int) -> tuple[np.ndarray, int, bytes | None]:
        """Return pixels, label, and what the disk level lacks."""
        kept = self.disk.read(sample) if self.disk is not None else None
        if kept is not None:
            try:
                pixels = decode(kept[0], self.source.channels, self.store)
                self._count(epoch, "disk")
                return pixels, kept[1], None
            except SampleError:
                pass  # the source may have been mended since
        data, label = self.source.read(sample)
        pixels = decode(data, self.source.channels, self.store)
        self._count(epoch, "source")
        return pixels, label, data if isinstance(data, bytes) else None

    def _count(self, epoch: int, what: str) -> None:
        with self._lock:
            self.counts.setdefault(epoch, Counter())[what] += 1

    def close(self) -> None:
        """Let the threads end. May be called twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)
