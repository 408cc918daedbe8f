"""Load a batch: load missing samples into memory, then read and augment all of them.

    check -> (read files -> native fill -> finish the rest) -> read

The steps in brackets run only if a sample is absent or damaged. `Filler` reads missing samples from
the disk level or, if it does not have them, from the source; several threads decode and store them.
"""

import errno
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.data import batches
from tfcommx.data.batches import ABSENT, DAMAGED, FILLED_BY_OTHER
from tfcommx.data.disk import Disk
from tfcommx.data.options import BatchSpec, Options
from tfcommx.data.pipeline import weak_method
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import metadata_of
from tfcommx.data.sources.decode import JPEG, PNG, decode, pack, stored_size
from tfcommx.data.sources.source import SampleError, Source

# Level at which `read_files` found a sample's file
FROM_DISK, FROM_SOURCE = 1, 2
# Errors that say nothing about a sample: too many open files, too little memory
OF_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Samples of a step of `warming`: enough for all threads, few enough for a steady progress bar
WARM = 64


class Filler:
    """Loads missing samples into the slab, for one process.

    Every process loads the samples that its batches need: in the first epoch each sample once,
    while training already runs.

    Args:
        options: options of the cache. `store`; `on_error`: with "skip", a sample that cannot be
            read is left out of its batch and counted, otherwise it is an error that names the file;
            unless a slab was made shorter for `partial`, the first sample that does not fit causes
            a warning.
        threads: number of threads that read and decode, >= 1.

    **Raises:** SampleError, from `fetch`, without "skip".
    """

    def __init__(
        self, source: Source, slab: Slab, disk: Disk | None, options: Options, threads: int
    ) -> None:
        self.source, self.slab, self.disk, self.store = source, slab, disk, options.store
        self.max_pixels = options.max_pixels
        self.skip = options.on_error == "skip"
        # A partial slab, too, was made for all samples if their estimated sizes fit
        self._has_room = not options.partial or bool(metadata_of(slab.file).get("part"))
        # Epoch -> number of samples that were read from "disk" and "source", were "repaired" or
        # "unreadable", or did not fit ("overflow")
        self.counts: dict[int, Counter[str]] = {}
        # Sample -> error message
        self.unreadable: dict[int, str] = {}
        # Whether a sample has been served in the place of an empty batch
        self._replaced = False
        # Epoch -> skipped samples
        self._skipped: dict[int, set[int]] = {}
        self._lock = threading.Lock()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "tfcommx-fill")

    def read_files(
        self, samples: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the JPEGs and PNGs among a batch's absent samples, for the native fill.

        All other samples, including those with errors, are left to `fetch`.

        Args:
            samples: sample numbers, int64 [b].
            state: result of `batches.check`, uint8 [b].

        Returns:
            Encoded bytes [b], empty for samples that are left to `fetch`; labels int64 [b]; level
            uint8 [b]: FROM_DISK, FROM_SOURCE or 0.
        """
        encoded = np.full(len(samples), b"", object)
        labels = np.zeros(len(samples), np.int64)
        level = np.zeros(len(samples), np.uint8)

        def bring(positions: np.ndarray) -> None:
            for i in positions.tolist():
                if file := self._file(int(samples[i])):
                    encoded[i], labels[i], level[i] = file

        # Not into a full slab, because the native fill would decode samples that it cannot store
        if not self.slab.full:
            # One task per thread, because one per sample would cost as much Python as its reading
            absent = np.flatnonzero(state == ABSENT)
            shares = [absent[first :: self._threads] for first in range(self._threads)]
            # `list` waits for the threads, and raises the error of any of them
            list(self._pool.map(bring, shares))
        return encoded, labels, level

    def _file(self, sample: int) -> tuple[bytes, int, int] | None:
        """Return (encoded bytes, label, level) of a JPEG or PNG that is not in memory, or None."""
        # Stored by another process, or unreadable
        if int(self.slab.index[sample]) != 0:
            return None
        try:
            on_disk = self.disk.read(sample) if self.disk is not None else None
            data, label = on_disk or self.source.read(sample)
        except (SampleError, OSError):
            return None
        if not isinstance(data, bytes) or not data.startswith((JPEG, PNG)):
            return None
        return data, label, FROM_DISK if on_disk else FROM_SOURCE

    def finish(
        self,
        samples: np.ndarray,
        state: np.ndarray,
        remaining: np.ndarray,
        epoch: int,
        encoded: np.ndarray,
        labels: np.ndarray,
        level: np.ndarray,
        of_epoch: int = 0,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count the samples of the native fill, write them to disk; return the `fetch` of the rest.

        Args:
            samples, state, of_epoch: as in `fetch`.
            remaining: result of `batches.fill`, uint8 [b].
            encoded, labels, level: results of `read_files`.
        """
        brought = (remaining == 0) | (remaining == FILLED_BY_OTHER)
        for i in np.flatnonzero((state != 0) & brought).tolist():
            self._count(int(epoch), "disk" if level[i] == FROM_DISK else "source")
            # A sample that another process stored is written to disk by that process
            if self.disk is not None and level[i] == FROM_SOURCE and remaining[i] == 0:
                self.disk.write(int(samples[i]), int(labels[i]), encoded[i])
        remaining = np.where(remaining == FILLED_BY_OTHER, 0, remaining)
        return self.fetch(samples, remaining, epoch, of_epoch)

    def fetch(
        self, samples: np.ndarray, state: np.ndarray, epoch: int, of_epoch: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Load a batch's missing samples, of any format.

        Args:
            samples, state: as in `read_files`.
            of_epoch: samples of this rank in the epoch; 0: unknown.

        Returns:
            The samples that can be read, int64 [b' <= b]; the records of those that do not fit into
            the slab, uint8 [m]; and the byte offset of each sample's record, int64 [b'], -1 for
            samples in the slab.

        **Raises:** SampleError, with "skip", once none of an epoch's samples can be read.
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
        if not keep.all():
            self._require_some(samples[~keep], int(epoch), int(of_epoch))
        return samples[keep], np.frombuffer(b"".join(loose), np.uint8), at[keep]

    def _bring(self, sample: int, damaged: bool, epoch: int) -> bytes | None:
        """Load a sample; return b"", or its record if it does not fit, or None if unreadable."""
        if self.slab.unreadable(sample) and self.skip:
            self._count(epoch, "unreadable")
            return None
        if not damaged and self.slab.get(sample) is not None:  # Stored by another process
            return b""
        try:
            pixels, label, data = self._decoded(sample, epoch)
        except (SampleError, OSError) as error:
            self._give_up(sample, damaged, epoch, error)
            return None
        # Stored by another process during the decoding
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
        """Return pixels, label, and the encoded bytes if the disk level lacks them."""
        on_disk = self.disk.read(sample) if self.disk is not None else None
        if on_disk is not None:
            try:
                pixels = decode(on_disk[0], self.source.channels, self.store, self.max_pixels)
                self._count(epoch, "disk")
                return pixels, on_disk[1], None
            except SampleError:
                pass  # Read from the source, which may have been fixed since
        data, label = self.source.read(sample)
        pixels = decode(data, self.source.channels, self.store, self.max_pixels)
        self._count(epoch, "source")
        return pixels, label, data if isinstance(data, bytes) else None

    def _give_up(self, sample: int, damaged: bool, epoch: int, error: Exception) -> None:
        """Raise for a sample that cannot be read; with `skip`, record and count it."""
        if damaged:  # Unpublish, because a read without a CRC check would serve it
            self.slab.forget(sample)
        message = f"Sample {sample} cannot be read: {self.source.where(sample)}: {error}."
        # Escaped, because a name that is not UTF-8 would empty the message in TensorFlow
        message = message.encode("utf-8", "backslashreplace").decode()
        if isinstance(error, OSError) and error.errno in OF_PROCESS:
            # Also with `skip`, which would leave out samples that are sound
            raise SampleError(
                f"{message} The limit is that of this process or host: raise it (`ulimit -n` for "
                "open files)."
            ) from error
        if not self.skip:
            raise SampleError(f"{message} Fix or remove it, or set on_error='skip'.") from error
        with self._lock:
            self.unreadable[sample] = message
        self._count(epoch, "unreadable")
        # Errors of the system are not marked, because a later read may succeed
        if isinstance(error, SampleError):
            self.slab.mark_unreadable(sample)

    def replace(
        self, skipped: np.ndarray, share: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Load another sample in the place of a batch of which none can be read.

        Args:
            skipped: the batch's samples, int64 [b].
            share: samples of this rank in the epoch, in order, int64 [n].

        Returns:
            As `fetch`, with the next sample of the share that can be read; none without such.
        """
        # From the batch's position, so that each empty batch of an epoch gets another sample
        start = int(np.flatnonzero(share == skipped[0])[0])
        for sample in np.roll(share, -start).tolist():
            # Counted for no epoch, because the sample is served in its own batch, too
            if (record := self._bring(sample, False, -1)) is not None:
                self._warn_of_empty_batch(int(epoch))
                at = 0 if record else -1
                return np.array([sample]), np.frombuffer(record, np.uint8), np.array([at])
        return np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(0, np.int64)

    def _warn_of_empty_batch(self, epoch: int) -> None:
        if self._replaced:
            return
        self._replaced = True
        warnings.warn(
            f"None of a batch's samples can be read in epoch {epoch}. Another sample takes their "
            "place, because a model cannot be trained on an empty batch. `unreadable` in "
            "DataCache.report counts such samples: fix or remove them.",
            stacklevel=3,
        )

    def _require_some(self, skipped: np.ndarray, epoch: int, of_epoch: int) -> None:
        """Record skipped samples; refuse an epoch without any others.

        **Raises:** SampleError with the reason of the first.
        """
        # Locked, because several batches are loaded at the same time
        with self._lock:
            of_all = self._skipped.setdefault(epoch, set())
            of_all.update(skipped.tolist())
            if not of_epoch or len(of_all) < of_epoch:
                return
            first = next(iter(self.unreadable.values()), "")
        first = first or f"{self.source.where(int(skipped[0]))}, by another process."
        raise SampleError(
            f"Samples that can be read are required. on_error='skip' has left out all {of_epoch:,} "
            f"of this rank in an epoch, the first: {first} Check the source and its mount."
        )

    def _warn_of_no_room(self) -> None:
        if not self._has_room:
            return
        self._has_room = False
        warnings.warn(
            f"{self.slab.path} has no room for all samples, though it was made for them: their "
            "sizes differ more than those of the samples that were measured, others have filled "
            "the shared memory, or `reshuffle_fraction` is used without `reshuffle`. The rest is "
            "read and decoded in every epoch, which is slow. Lower `store`, the short side of "
            "stored images, or free shared memory.",
            stacklevel=3,
        )

    def _count(self, epoch: int, kind: str) -> None:
        with self._lock:
            self.counts.setdefault(epoch, Counter())[kind] += 1

    def close(self) -> None:
        """End the threads. May be called twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Loader:
    """Loads batches for one process, in TensorFlow's graph."""

    def __init__(self, source: Source, slab: Slab, filler: Filler, options: Options) -> None:
        self.source, self.slab, self.filler, self.options = source, slab, filler, options
        self._read = weak_method(self, lambda loader, *args: loader.filler.read_files(*args))
        self._finish = weak_method(self, lambda loader, *args: loader.filler.finish(*args))

    def load(
        self,
        samples: tf.Tensor,
        epoch: tf.Tensor,
        spec: BatchSpec,
        of_epoch: int,
        replace: Callable[..., Any],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return (images spec.dtype [b, h, w, c], labels int64 [b]) of a batch.

        Args:
            of_epoch: samples of this rank in the epoch.
            replace: (samples, epoch) -> result of `Filler.replace`.
        """
        slab, options = self.slab, self.options
        state = batches.check(slab, samples, epoch, options.verify, options.seed)
        requested = samples
        present = (samples, tf.zeros([0], tf.uint8), -tf.ones_like(samples))
        # An epoch whose samples are all in memory calls no Python, whose lock training may hold
        samples, loose, at = tf.cond(
            tf.reduce_any(state > 0),
            lambda: self._bring(samples, state, epoch, of_epoch),
            lambda: present,
        )
        if options.on_error == "skip" and spec.shuffle and spec.drop_remainder:
            batch = samples, loose, at
            samples, loose, at = tf.cond(
                tf.size(samples) == 0,
                lambda: _vectors(replace, [requested, epoch]),
                lambda: batch,
            )
        # It depends on results of the fill, so TensorFlow cannot read a sample before it is stored
        images, labels, _ = batches.read(
            slab, samples, loose, at, epoch, spec, self.source.channels, options.seed
        )
        return self._with_static_shape(images, labels, spec)

    def _bring(
        self, samples: tf.Tensor, state: tf.Tensor, epoch: tf.Tensor, of_epoch: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Load the samples missing by `state`, natively if possible; return as `Filler.fetch`."""
        encoded, labels, level = tf.numpy_function(
            self._read, [samples, state], [tf.string, tf.int64, tf.uint8]
        )
        remaining = self._fill(encoded, samples, labels, state)
        arguments = [samples, state, remaining, epoch, encoded, labels, level, of_epoch]
        return _vectors(self._finish, arguments)

    def _fill(
        self, encoded: tf.Tensor, samples: tf.Tensor, labels: tf.Tensor, state: tf.Tensor
    ) -> tf.Tensor:
        channels, store = self.source.channels, self.options.store
        return batches.fill(
            self.slab, encoded, samples, labels, state, channels, store, self.options.max_pixels
        )

    def batch_bytes(self, spec: BatchSpec) -> int:
        """Return the bytes of a batch of images; 0 if their size is known only after reading."""
        height, width = (spec.resolution or 0,) * 2
        if spec.resolution is None and self.source.shape is not None:
            height, width = stored_size(*self.source.shape, self.options.store)
        entry_bytes: int = tf.as_dtype(spec.dtype).size
        return spec.batch * height * width * self.source.channels * entry_bytes

    def _with_static_shape(
        self, images: tf.Tensor, labels: tf.Tensor, spec: BatchSpec
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Set the parts of the shapes that are known before a batch is loaded."""
        if spec.resolution is None and self.source.shape is not None:
            size = stored_size(*self.source.shape, self.options.store)
            shape = [*size, self.source.channels]
            # Built from the shape, because a batch without samples has no images to read it from
            none = tf.zeros([0, *shape], images.dtype)
            images = tf.ensure_shape(
                tf.cond(tf.size(labels) == 0, lambda: none, lambda: images), [None, *shape]
            )
        if spec.drop_remainder and self.options.on_error == "raise":
            images = tf.ensure_shape(images, [spec.batch, *images.shape[1:]])
            labels = tf.ensure_shape(labels, [spec.batch])
        return images, labels

    def warming(self, samples: np.ndarray) -> Iterator[None]:
        """Load samples, int64 [n], into memory, WARM in a step."""
        check = _traced(
            lambda chunk: batches.check(self.slab, chunk, tf.constant(0, tf.int64), 0.0, 0),
            tf.int64,
        )
        fill = _traced(self._fill, tf.string, tf.int64, tf.int64, tf.uint8)
        for start in range(0, len(samples), WARM):
            chunk = samples[start : start + WARM]
            state = check(chunk)
            files, labels, level = self.filler.read_files(chunk, state)
            remaining = fill(files, chunk, labels, state)
            self.filler.finish(
                chunk, state, remaining, -1, files, labels, level, of_epoch=len(samples)
            )
            yield


def _vectors(work: Callable[..., Any], arguments: list[Any]) -> tuple[tf.Tensor, ...]:
    """Call `Filler.finish` or `Filler.replace` in a graph, and state the ranks of the results."""
    result = tf.numpy_function(work, arguments, [tf.int64, tf.uint8, tf.int64])
    for tensor in result:
        tensor.set_shape([None])
    return tuple(result)


def _traced(work: Callable[..., tf.Tensor], *kinds: tf.DType) -> Callable[..., np.ndarray]:
    """Return `work` on vectors of these dtypes as a separate TensorFlow function."""
    # Because TensorFlow never drops ops that are called outside of functions, nor their reference
    # to the slab
    traced = tf.function(work, autograph=False).get_concrete_function(
        *(tf.TensorSpec([None], kind) for kind in kinds)
    )
    return lambda *args: traced(*map(tf.constant, args)).numpy()
