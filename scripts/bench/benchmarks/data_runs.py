"""Measurements and checks of the benchmark `data`: pipeline epochs, whole samples, memcpy."""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

import numpy as np
import tensorflow as tf
from bench import options
from bench.benchmarks.data_pipelines import BATCH

import tfcommx as cx
from tfcommx.data.batches import read
from tfcommx.data.sources import Arrays
from tfcommx.kernels.augment import augment_definition, window_of


def claim_memory(memory: str) -> None:
    """Write 2 GB of shared memory and free them, so that the host has given it back.

    A host that has taken unused memory back from this virtual machine returns it now. Otherwise the
    first epoch measures the host: 0.4 GB/s was seen for memory that must come back, 3 for memory
    that is there.

    Args:
        memory: folder of shared memory.
    """
    piece = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=memory) as file:
        for _ in range(min(2000, shutil.disk_usage(memory).free // len(piece) // 2)):
            file.write(piece)


def memcpy_bytes_per_second(size: int) -> float:
    """Copy this many bytes, aligned; return the median rate of nine."""
    a, b = np.ones(size, np.uint8), np.ones(size, np.uint8)
    rates = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(b, a)
        rates.append(a.size / (time.perf_counter() - start))
    return float(np.median(rates))


class Run:
    """Epochs of one pipeline: the first, and `repeats` later ones in turn with other pipelines."""

    def __init__(self, name: str, resolution: int, wanted: np.ndarray, repeats: int) -> None:
        """Get ready.

        Args:
            name: of the row.
            resolution: pixels on a side.
            wanted: how often each label comes in an epoch.
            repeats: epochs that are timed after the first.
        """
        self.name, self.resolution, self.wanted = name, resolution, wanted
        self.images, self._rng = int(wanted.sum()), np.random.default_rng()
        # Epochs served, also those that were not timed
        self.epochs = 0
        # Epoch, step, pictures: one batch of each timed epoch, chosen anew.
        self.kept: list[tuple[int, int, np.ndarray]] = []
        self.wall: list[float] = []
        self.cpu: list[float] = []
        # Touched before the clock starts: if the batches themselves were kept, each would cost the
        # pipelines fresh memory.
        self.room = np.ones((1 + repeats, BATCH, resolution, resolution, 3), np.float32)

    def begin(self, dataset: tf.data.Dataset) -> None:
        """Time the first epoch of batches of images and labels."""
        self._batches = iter(dataset)
        self.serve(timed=True)

    def take_turn(self) -> None:
        """Serve two epochs; time the second, for which nothing was prefetched in others' turns."""
        self.serve(timed=False)
        self.serve(timed=True)

    def steps(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-self.images // BATCH)

    def serve(self, timed: bool) -> None:
        """Serve an epoch and check its labels; time it, and keep a copy of one batch, or not."""
        chosen = int(self._rng.integers(self.steps())) if timed else -1
        seen = []
        wall, cpu = time.perf_counter(), time.process_time()
        for step in range(self.steps()):
            images, label = next(self._batches)
            seen.append(label)
            if step == chosen:
                kept = self.room[len(self.kept), : len(label)]
                np.copyto(kept, memoryview(images))
        if timed:
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(time.process_time() - cpu)
            self.kept.append((self.epochs, chosen, kept))
        self.epochs += 1
        labels = np.bincount(np.concatenate(seen), minlength=len(self.wanted)).tolist()
        assert labels == self.wanted.tolist(), (
            f"{self.name}: labels {labels} were served, {self.wanted} are right"
        )

    def mean(self) -> float:
        """Return the mean of the pictures that were kept."""
        return float(np.mean([images.mean() for _, _, images in self.kept]))

    def row(self, limit: float) -> dict[str, Any]:
        """Return the row of the epochs after the first.

        Args:
            limit: images per second that memcpy would allow.
        """
        return data_row(
            self.name,
            self.resolution,
            self.images,
            wall=float(np.median(self.wall[1:])),
            cpu=float(np.median(self.cpu[1:])),
            limit_seconds=self.images / limit,
        )


def data_row(
    name: str, resolution: int, images: int, *, wall: float, cpu: float, limit_seconds: float
) -> dict[str, Any]:
    """Make a row of the shared columns and the rates of some images, which have been verified."""
    return options.row(
        name,
        resolution,
        wall,
        True,
        limit_seconds=limit_seconds,
        images=images,
        images_per_second=round(images / wall),
        images_per_cpu_second=round(images / cpu),
        limit_images_per_second=round(images / limit_seconds),
    )


def check_with_twin(
    cache: cx.DataCache, spec: cx.BatchSpec, epoch: int, step: int, images: np.ndarray
) -> None:
    """Compare all pictures of one batch with the definition in plain TensorFlow."""
    samples = cache.share(epoch)[step * BATCH : (step + 1) * BATCH].tolist()
    for image, sample in zip(images, samples, strict=True):
        pixels, _ = cache.slab.get(sample)
        cut = window_of(spec.rule(cache.options.seed), epoch, sample, *pixels.shape[:2])
        want = augment_definition(
            pixels, cut, image.shape[:2], "float32", (0.0,) * 3, (1.0,) * 3
        ).numpy()
        worst = np.abs(image - want).max()
        assert worst <= 1 / 255, (
            f"sample {sample} differs from the twin by {worst * 255} grey levels"
        )


def whole_samples(memory: str, count: int) -> dict[str, Any]:
    """Time random batches of whole samples, in turn with a memcpy of as many bytes in a row.

    Args:
        memory: folder of the slab.
        count: samples in it, a multiple of 256.

    Returns:
        The row of a batch of 256 x 128 x 128 x 3 bytes; its limit is the memcpy.
    """
    images = np.random.default_rng(0).integers(0, 256, (count, 128, 128, 3), np.uint8)
    cache = cx.DataCache(Arrays(images, np.arange(count)), memory=memory)
    cache.warm()
    rng, none, at = np.random.default_rng(1), np.zeros(0, np.uint8), -np.ones(256, np.int64)
    spec = cx.BatchSpec(batch=256, dtype="uint8")

    # Eager: calling a tf.function of nothing takes 0.2 ms of Python, a third of the copy's time.
    def call(indices: tf.Tensor) -> tf.Tensor:
        return read(cache.slab, indices, none, at, tf.constant(0, tf.int64), spec, 3, 0)[0]

    call(tf.constant(rng.permutation(count)[:256]))  # maps the slab
    target, times = np.ones_like(images[:256]), []
    for turn in range(200):
        indices = tf.constant(rng.permutation(count)[:256])
        start = int(rng.integers(count // 256)) * 256
        got = None  # its memory is used again, as the copy uses one target
        marks = [(time.perf_counter(), time.process_time())]
        got = call(indices)
        marks.append((time.perf_counter(), time.process_time()))
        np.copyto(target, images[start : start + 256])
        marks.append((time.perf_counter(), time.process_time()))
        times.append(np.diff(marks, axis=0))
        if turn % 20 == 0:
            np.testing.assert_array_equal(got, images[indices.numpy()])
    cache.close()
    return data_row(
        "datacache_whole",
        128,
        256,
        wall=float(np.median([time[0, 0] for time in times])),
        cpu=float(np.mean([time[0, 1] for time in times])),
        limit_seconds=float(np.median([time[1, 0] for time in times])),
    )
