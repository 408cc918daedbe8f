"""Feeding a training from the DataCache, against the pipelines that it replaces.

Goal, not reached yet (docs/benchmarks.md): from the second epoch on, per CPU second, random-resized-crop + flip from the slab
is at least 10 times (128 pixels) and 6 times (224 pixels) as fast as decoding in tf.data, and 4 times as fast as tf.data's
`.cache()` of decoded images with TensorFlow's resize; whole samples are read at 0.7 of memcpy or better; the first epoch takes
at most 1.15 of the time of the tf.data pipeline that fills nothing.

    python scripts/bench_data.py                     # generated JPEGs
    python scripts/bench_data.py --folder photos/train --json out.json --png out.png

Each row is the best of `--repeats` epochs, interleaved, in one process. `limit_images_per_second` is what memcpy of
the output's bytes
would allow on one core. Every row is verified while it is timed: every sample once (by label counts), and for the cache
the last batch against the plain-TensorFlow twin; for the others, that the mean of the pictures agrees with the cache's.
FFCV, another cache to compare with, is not measured yet.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BATCH = 64


def generate(folder: Path, count: int) -> None:
    """Write JPEGs of about 400 x 533 and 30 KB: smooth noise, as photos are, in ten classes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for n in range(count):
        kind = folder / f"class{n % 10}"
        kind.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (60, 45, 3), np.uint8)).resize((400, 533), Image.BICUBIC)
        out = io.BytesIO()
        small.save(out, "JPEG", quality=85)
        (kind / f"{n:05}.jpg").write_bytes(out.getvalue())


def cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system


class Run:
    """Epochs of one pipeline: counts, labels and mean of what came, and the time that it took."""

    def __init__(self, name: str, resolution: int, epoch) -> None:
        self.name, self.resolution, self.epoch = name, resolution, epoch
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.means: list[float] = []
        self.images = 0

    def once(self, number: int, labels_wanted: np.ndarray) -> None:
        seen, total, last = [], 0.0, None
        wall, cpu = time.perf_counter(), cpu_seconds()
        for images, labels in self.epoch(number):
            seen.append(labels)
            last = images
            total += float(images[0, 0, 0, 0])  # touched
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(cpu_seconds() - cpu)
        counts = np.bincount(np.concatenate([np.asarray(label).reshape(-1) for label in seen]), minlength=len(labels_wanted))
        assert counts.tolist() == labels_wanted.tolist(), f"{self.name}: labels {counts} were served, {labels_wanted} are right"
        self.images = int(counts.sum())
        self.means.append(float(np.asarray(last, np.float32).mean()))

    def row(self, limit: float) -> dict:
        best = int(np.argmin(self.cpu[1:])) + 1 if len(self.cpu) > 1 else 0
        return {
            "name": self.name,
            "resolution": self.resolution,
            "images_per_second": round(self.images / min(self.wall[1:] or self.wall)),
            "images_per_cpu_second": round(self.images / self.cpu[best]),
            "limit_images_per_second": round(limit),
            "verified": True,
        }


def memcpy_bytes_per_second() -> float:
    """Copy 64 MiB blocks, aligned, back and forth over 512 MiB; the median of nine."""
    a, b = np.ones(2**29, np.uint8), np.ones(2**29, np.uint8)
    rates = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(b, a)
        rates.append(a.size / (time.perf_counter() - start))
    return float(np.median(rates))


def pipelines(source, resolution: int):
    """Return (decode, cached, fill-less reference) epochs in plain tf.data."""
    import tensorflow as tf

    files = tf.constant([source.where(i) for i in range(source.count)])
    labels = tf.constant([source.label(i) for i in range(source.count)], tf.int64)
    size = [resolution, resolution]

    def window(shape):
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            shape,
            tf.zeros([0, 0, 4]),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        return begin, extent

    def finish(image):
        return tf.image.random_flip_left_right(tf.image.resize(image, size)) / 255.0

    def decode(file, label):
        data = tf.io.read_file(file)
        begin, extent = window(tf.io.extract_jpeg_shape(data))
        return finish(tf.image.decode_and_crop_jpeg(data, tf.concat([begin[:2], extent[:2]], 0), channels=3)), label

    def whole(file, label):
        return tf.io.decode_jpeg(tf.io.read_file(file), channels=3), label

    def cut(image, label):
        begin, extent = window(tf.shape(image))
        return finish(tf.slice(image, begin, extent)), label

    order = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(source.count, seed=1)
    auto = tf.data.AUTOTUNE
    decoded = order.map(decode, auto).batch(BATCH).prefetch(auto)
    kept = (
        tf.data.Dataset.from_tensor_slices((files, labels))
        .map(whole, auto)
        .cache()
        .shuffle(256)
        .map(cut, auto)
        .batch(BATCH)
        .prefetch(auto)
    )
    return (lambda _: decoded), (lambda _: kept)


def verify_cache(cache, phase, images, epoch: int) -> None:
    """The first four images of the first batch of an epoch, against the twin."""
    from tfcommx.reference_augment import augment, window_of

    for image, sample in zip(images[:4].numpy(), cache.share(epoch)[:4].tolist(), strict=False):
        pixels, _ = cache.slab.get(sample)
        window = window_of(phase.rule(cache.options.seed), epoch, sample, *pixels.shape[:2])
        want = augment(pixels, window, image.shape[:2], "float32", (0.0,) * 3, (1.0,) * 3).numpy()
        assert np.abs(image - want).max() <= 1 / 255, (
            f"sample {sample} differs from the twin by {np.abs(image - want).max() * 255} grey levels"
        )


def whole_samples(copy: float) -> dict:
    """Random batches of 256 x 128 x 128 x 3 bytes from the slab, against memcpy of as many bytes."""
    import tensorflow as tf

    from tfcommx.data.arrays import Arrays
    from tfcommx.data.augment import Phase, read
    from tfcommx.data.cache import DataCache, Options

    images = np.random.default_rng(0).integers(0, 256, (8192, 128, 128, 3), np.uint8)
    cache = DataCache(Arrays(images, np.arange(8192)), options=Options(memory=ARGS.memory))
    cache.warm()
    rng, none, at = np.random.default_rng(1), np.zeros(0, np.uint8), -np.ones(256, np.int64)
    phase = Phase(batch=256, dtype="uint8")
    call = tf.function(lambda indices: read(cache.slab, indices, none, at, tf.constant(0, tf.int64), phase, 3, 0)[0])
    rates = []
    for _ in range(3):
        wall, cpu = time.perf_counter(), cpu_seconds()
        for _ in range(64):
            indices = rng.permutation(8192)[:256]
            got = call(tf.constant(indices))
        rates.append((64 * 256 / (time.perf_counter() - wall), 64 * 256 / (cpu_seconds() - cpu)))
        np.testing.assert_array_equal(got[17], images[indices[17]])
    cache.close()
    per_second, per_cpu = max(rates, key=lambda rate: rate[1])
    return {
        "name": "datacache_whole",
        "resolution": 128,
        "images_per_second": round(per_second),
        "images_per_cpu_second": round(per_cpu),
        "limit_images_per_second": round(copy / (128 * 128 * 3)),
        "verified": True,
    }


def main() -> None:
    import tensorflow as tf

    from tfcommx.data.augment import Phase
    from tfcommx.data.cache import DataCache, Options
    from tfcommx.data.folder import Folder

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(ARGS.folder or scratch)
        if ARGS.folder is None:
            generate(folder, ARGS.images)
        source = Folder(folder)
        wanted = np.bincount([source.label(i) for i in range(source.count)], minlength=len(source.classes))
        copy = memcpy_bytes_per_second()
        rows, first = [whole_samples(copy)], []
        for resolution in ARGS.resolutions:
            decode, cached = pipelines(source, resolution)
            cache = DataCache(source, options=Options(memory=ARGS.memory, store=ARGS.store or resolution * 8 // 7))
            phase = Phase(BATCH, resolution, "random", True, drop_remainder=False)
            runs = [
                Run("tfdata_decode", resolution, decode),
                Run("tfdata_cache", resolution, cached),
                Run("datacache", resolution, lambda epoch, cache=cache, phase=phase: cache.dataset(phase, epoch)),
            ]
            for image, _ in tf.data.Dataset.range(2 * BATCH).map(lambda i: (i, i)).batch(BATCH):  # TensorFlow's own start-up
                image.numpy()
            for epoch in range(1 + ARGS.repeats):
                for run in runs:
                    run.once(epoch, wanted)
            verify_cache(cache, phase, next(iter(cache.dataset(phase, 1)))[0], 1)
            means = [np.mean(run.means) for run in runs]
            assert np.ptp(means) < 0.1, f"the pipelines disagree about the pictures: means {means}"
            report = cache.report(ARGS.repeats)
            assert report["hit_memory"] == 1, report
            limit = copy / (resolution * resolution * 3 * 4)
            rows += [run.row(limit) for run in runs]
            first.append((resolution, runs[2].wall[0] / runs[0].wall[0]))
            cache.close()
    show(rows, first)


def show(rows: list[dict], first: list[tuple[int, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Feeding from memory: random-resized-crop + flip, float32")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console(width=130)
    console.print(table)
    for resolution, ratio in first:
        at = {row["name"]: row["images_per_cpu_second"] for row in rows if row["resolution"] == resolution}
        console.print(
            f"{resolution} pixels, per CPU second: {at['datacache'] / at['tfdata_decode']:.1f} times tfdata_decode, "
            f"{at['datacache'] / at['tfdata_cache']:.1f} times tfdata_cache; first epoch {ratio:.2f} of tfdata_decode's time"
        )
    whole = rows[0]
    console.print(
        f"whole samples: {whole['images_per_second'] / whole['limit_images_per_second']:.2f} of memcpy on one core, "
        f"{whole['images_per_cpu_second'] / whole['limit_images_per_second']:.2f} per CPU second"
    )
    if ARGS.json:
        Path(ARGS.json).write_text(json.dumps(rows, indent=1) + "\n")
    if ARGS.png:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        names = [f"{row['name']}\n{row['resolution']}" for row in rows]
        figure, axes = pyplot.subplots(figsize=(9, 4))
        axes.bar(names, [row["images_per_cpu_second"] for row in rows])
        axes.set(ylabel="images per CPU second", yscale="log")
        figure.tight_layout()
        figure.savefig(ARGS.png, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="of class folders with JPEGs; default: generated")
    parser.add_argument("--images", type=int, default=1000, help="how many are generated")
    parser.add_argument("--resolutions", type=int, nargs="+", default=[128, 224])
    parser.add_argument("--store", type=int, help="short side kept in memory, pixels; default: 8/7 of the resolution")
    parser.add_argument("--repeats", type=int, default=3, help="epochs after the first")
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--json")
    parser.add_argument("--png")
    ARGS = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
