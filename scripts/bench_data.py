"""Feeding a training from the DataCache, against the pipelines that it replaces.

Goals: from the second epoch on, per CPU second, random-resized-crop + flip from the slab is at
least 10 times (128 pixels) and 6 times (224 pixels) as fast as decoding in tf.data, and 4 times as
fast as tf.data's `.cache()` of decoded images with TensorFlow's resize; whole samples are read at
0.7 of memcpy or better; the first epoch takes at most 1.15 of the time of the tf.data pipeline that
fills nothing. docs/benchmarks.md says what was reached.

    python scripts/bench_data.py                     # generated JPEGs
    python scripts/bench_data.py --folder photos/train --json out.jsonl --png out.png

Each row is the mean over `--repeats` epochs in a row, after the first; an iterator goes over all
epochs of a pipeline and was made before the clock starts. First epochs vary by a third, so
`--firsts` of them are made, in turn with the other pipeline's, and medians are compared.
`limit_images_per_second` is what memcpy of the output's bytes would allow on one core.
`tfdata_cache` keeps whole pictures as its users do; `tfdata_cache_same` keeps pictures of the size
that the slab keeps, which is the like for like. Verified in every epoch that is timed: every sample
came once (by label counts); for the cache, all pictures of one batch, chosen anew, against the
plain-TensorFlow twin; for the others, that the mean of such a batch agrees with the cache's.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
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
        small = Image.fromarray(rng.integers(0, 256, (60, 45, 3), np.uint8)).resize(
            (400, 533), Image.BICUBIC
        )
        out = io.BytesIO()
        small.save(out, "JPEG", quality=85)
        (kind / f"{n:05}.jpg").write_bytes(out.getvalue())


def cpu_seconds() -> float:
    return time.process_time()


def claim_memory() -> None:
    """Write 2 GB of shared memory and free them: a host that has taken unused memory back from this
    virtual machine returns it now.

    Else the first epoch measures the host: 0.4 GB/s was seen for memory that must come back, 3 for
    memory that is there.
    """
    piece = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=ARGS.memory) as file:
        for _ in range(min(2000, shutil.disk_usage(ARGS.memory).free // len(piece) // 2)):
            file.write(piece)


class Run:
    """All epochs of one pipeline: the first, then `repeats` in a row, so that what is loaded ahead
    of one is paid in the last.
    """

    def __init__(
        self, name: str, resolution: int, dataset, wanted: np.ndarray, repeats: int
    ) -> None:
        self.name, self.resolution, self.images = name, resolution, int(wanted.sum())
        steps, batches, rng = -(-self.images // BATCH), iter(dataset), np.random.default_rng()
        # epoch, step, pictures: one batch of each epoch, chosen anew
        self.kept: list[tuple[int, int, np.ndarray]] = []
        self.wall, self.cpu, labels = [], [], []
        # touched before the clock starts: were the batches themselves kept, each would cost the
        # pipelines fresh memory
        room = np.ones((1 + repeats, BATCH, resolution, resolution, 3), np.float32)
        if not ARGS.as_found:
            claim_memory()
        for epoch in range(1 + repeats):
            chosen, seen = int(rng.integers(steps)), []
            wall, cpu = time.perf_counter(), cpu_seconds()
            for step in range(steps):
                images, label = next(batches)
                seen.append(label)
                if step == chosen:
                    kept = room[epoch, : len(label)]
                    np.copyto(kept, memoryview(images))
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(cpu_seconds() - cpu)
            self.kept.append((epoch, chosen, kept))
            labels.append(np.bincount(np.concatenate(seen), minlength=len(wanted)))
        assert all(count.tolist() == wanted.tolist() for count in labels), (
            f"{name}: labels {labels} were served, {wanted} are right"
        )

    def mean(self) -> float:
        return float(np.mean([images.mean() for _, _, images in self.kept]))

    def row(self, limit: float) -> dict:
        return {
            "name": self.name,
            "resolution": self.resolution,
            "images_per_second": round(self.images * ARGS.repeats / sum(self.wall[1:])),
            "images_per_cpu_second": round(self.images * ARGS.repeats / sum(self.cpu[1:])),
            "limit_images_per_second": round(limit),
            "verified": True,
        }


def memcpy_bytes_per_second() -> float:
    """Copy 512 MiB, aligned; the median of nine."""
    a, b = np.ones(2**29, np.uint8), np.ones(2**29, np.uint8)
    rates = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(b, a)
        rates.append(a.size / (time.perf_counter() - start))
    return float(np.median(rates))


def pipelines(source, resolution: int, store: int):
    """Return endless datasets in plain tf.data: decoding, keeping whole pictures, keeping pictures
    of the slab's size.
    """
    import tensorflow as tf

    from tfcommx.data.sources.decode import decode as decode_small

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
        return finish(
            tf.image.decode_and_crop_jpeg(data, tf.concat([begin[:2], extent[:2]], 0), channels=3)
        ), label

    def whole(file, label):
        return tf.io.decode_jpeg(tf.io.read_file(file), channels=3), label

    def small(file, label):
        image = tf.numpy_function(
            lambda data: decode_small(data, 3, store),
            [tf.io.read_file(file)],
            tf.uint8,
            stateful=False,
        )
        return tf.ensure_shape(image, [None, None, 3]), label

    def cut(image, label):
        begin, extent = window(tf.shape(image))
        return finish(tf.slice(image, begin, extent)), label

    every = tf.data.Dataset.from_tensor_slices((files, labels))
    auto = tf.data.AUTOTUNE
    decoded = (
        every.shuffle(source.count, seed=1).map(decode, auto).batch(BATCH).repeat().prefetch(auto)
    )
    keeping = [
        every.map(load, auto)
        .cache()
        .shuffle(256)
        .map(cut, auto)
        .batch(BATCH)
        .repeat()
        .prefetch(auto)
        for load in (whole, small)
    ]
    return decoded, *keeping


def against_twin(cache, spec, epoch: int, step: int, images) -> None:
    """Check all pictures of one batch."""
    from tfcommx.kernels.augment import augment_definition, window_of

    samples = cache.share(epoch)[step * BATCH : (step + 1) * BATCH].tolist()
    for image, sample in zip(images, samples, strict=True):
        pixels, _ = cache.slab.get(sample)
        window = window_of(spec.rule(cache.options.seed), epoch, sample, *pixels.shape[:2])
        want = augment_definition(
            pixels, window, image.shape[:2], "float32", (0.0,) * 3, (1.0,) * 3
        ).numpy()
        worst = np.abs(image - want).max()
        assert worst <= 1 / 255, (
            f"sample {sample} differs from the twin by {worst * 255} grey levels"
        )


def whole_samples() -> dict:
    """Random batches of 256 x 128 x 128 x 3 bytes from the slab, in turn with a memcpy of as many
    bytes in a row.
    """
    import tensorflow as tf

    import tfcommx as cx
    from tfcommx.data.cache.batches import read
    from tfcommx.data.sources import Arrays

    images = np.random.default_rng(0).integers(0, 256, (8192, 128, 128, 3), np.uint8)
    cache = cx.DataCache(Arrays(images, np.arange(8192)), memory=ARGS.memory)
    cache.warm()
    rng, none, at = np.random.default_rng(1), np.zeros(0, np.uint8), -np.ones(256, np.int64)
    spec = cx.BatchSpec(batch=256, dtype="uint8")

    # eager: calling a tf.function of nothing takes 0.2 ms of Python, a third of what the copy takes
    def call(indices):
        return read(cache.slab, indices, none, at, tf.constant(0, tf.int64), spec, 3, 0)[0]

    call(tf.constant(rng.permutation(8192)[:256]))  # maps the slab
    target, times = np.ones_like(images[:256]), []
    for turn in range(200):
        indices = tf.constant(rng.permutation(8192)[:256])
        start = int(rng.integers(8192 // 256)) * 256
        got = None  # its memory is used again, as the copy uses one target
        marks = [(time.perf_counter(), cpu_seconds())]
        got = call(indices)
        marks.append((time.perf_counter(), cpu_seconds()))
        np.copyto(target, images[start : start + 256])
        marks.append((time.perf_counter(), cpu_seconds()))
        times.append(np.diff(marks, axis=0))
        if turn % 20 == 0:
            np.testing.assert_array_equal(got, images[indices.numpy()])
    cache.close()
    return {
        "name": "datacache_whole",
        "resolution": 128,
        "images_per_second": round(256 / np.median([time[0, 0] for time in times])),
        "images_per_cpu_second": round(256 / np.mean([time[0, 1] for time in times])),
        "limit_images_per_second": round(256 / np.median([time[1, 0] for time in times])),
        "verified": True,
    }


def main() -> None:
    import tensorflow as tf

    import tfcommx as cx
    from tfcommx.data.sources import Folder

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(ARGS.folder or scratch)
        if ARGS.folder is None:
            generate(folder, ARGS.images)
        source = Folder(folder)
        wanted = np.bincount(
            [source.label(i) for i in range(source.count)], minlength=len(source.classes)
        )
        copy = memcpy_bytes_per_second()
        # TensorFlow's own start-up
        for image in tf.data.Dataset.range(2 * BATCH).map(lambda i: i).batch(BATCH):
            image.numpy()
        rows, first = [whole_samples()], []
        for resolution in ARGS.resolutions:
            store = ARGS.store or resolution * 8 // 7
            spec = cx.BatchSpec(BATCH, resolution, "random", True, drop_remainder=False)
            options = dict(memory=ARGS.memory, store=store)
            fills = []  # first epochs alone: (of tfdata_decode, of the cache)
            for _ in range(ARGS.firsts):
                cache = cx.DataCache(source, **options)
                alone = (pipelines(source, resolution, store)[0], cache.dataset(spec, 0, 1))
                fills.append([Run("first epoch", resolution, data, wanted, 0) for data in alone])
                cache.close()
            cache = cx.DataCache(source, **options)
            names = ("tfdata_decode", "tfdata_cache", "tfdata_cache_same", "datacache")
            fed = (*pipelines(source, resolution, store), cache.dataset(spec, 0, 1 + ARGS.repeats))
            runs = [
                Run(name, resolution, data, wanted, ARGS.repeats)
                for name, data in zip(names, fed, strict=True)
            ]
            for kept in runs[3].kept:
                against_twin(cache, spec, *kept)
            means = [run.mean() for run in runs]
            assert np.ptp(means) < 0.1, f"the pipelines disagree about the pictures: means {means}"
            assert cache.report(ARGS.repeats)["hit_memory"] == 1
            limit = copy / (resolution * resolution * 3 * 4)
            rows += [run.row(limit) for run in runs]
            plain, cached = (
                np.median([(run.wall[0], run.cpu[0]) for run in column], axis=0)
                for column in zip(*fills, strict=True)
            )
            first.append((resolution, *(cached / plain)))
            cache.close()
    show(rows, first)


def without_ffcv() -> str:
    """Say why FFCV, another cache, is not measured."""
    try:
        import ffcv
    except ImportError as error:
        return (
            f"It is not installed here ({error}). FFCV 1.0.2 comes as source only, and its build "
            "stops without the C++ headers of "
            "OpenCV and libturbojpeg; it also needs PyTorch."
        )
    return f"{ffcv.__file__} is there, but this script has no run of it yet."


def show(rows: list[dict], first: list[tuple[int, float, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Feeding from memory: random-resized-crop + flip, float32")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console(width=130)
    console.print(table)
    for resolution, wall, cpu in first:
        at = {
            row["name"]: row["images_per_cpu_second"]
            for row in rows
            if row["resolution"] == resolution
        }
        ratios = ", ".join(
            f"{at['datacache'] / at[name]:.1f} times {name}"
            for name in at
            if name.startswith("tfdata")
        )
        console.print(
            f"{resolution} pixels, per CPU second: {ratios}; first epoch: {wall:.2f} of "
            f"tfdata_decode's time, {cpu:.2f} of its "
            "CPU time"
        )
    console.print(f"ffcv: no row. {without_ffcv()}")
    whole = rows[0]
    console.print(
        f"whole samples: {whole['images_per_second'] / whole['limit_images_per_second']:.2f} of "
        "memcpy on one core, "
        f"{whole['images_per_cpu_second'] / whole['limit_images_per_second']:.2f} per CPU second"
    )
    if ARGS.json:
        Path(ARGS.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="of class folders with JPEGs; default: generated")
    parser.add_argument("--images", type=int, default=1000, help="how many are generated")
    parser.add_argument("--resolutions", type=int, nargs="+", default=[128, 224])
    parser.add_argument(
        "--store",
        type=int,
        help="short side kept in memory, pixels; default: 8/7 of the resolution",
    )
    parser.add_argument("--repeats", type=int, default=5, help="epochs after the first")
    parser.add_argument(
        "--firsts",
        type=int,
        default=5,
        help="first epochs of each of the two pipelines that are compared in them",
    )
    parser.add_argument(
        "--as-found",
        action="store_true",
        help="do not first take memory back from the host, see `claim_memory`",
    )
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--json", help="write one object a line to this file")
    parser.add_argument("--png")
    ARGS = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
