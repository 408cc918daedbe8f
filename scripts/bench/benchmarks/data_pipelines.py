"""The peers of the DataCache in the benchmark `data`: pipelines of tf.data; generated photos."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import tensorflow as tf
from PIL import Image

from tfcommx.data.sources import Folder
from tfcommx.data.sources.decode import decode as decode_small

BATCH = 64
AUTO = tf.data.AUTOTUNE


def generate(folder: Path, count: int) -> None:
    """Write JPEGs of about 400 x 533 and 30 KB: smooth noise, as photos are, in ten classes."""
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


def window(shape: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw begin and size of a random-resized-crop of a picture of this shape."""
    begin, extent, _ = tf.image.sample_distorted_bounding_box(
        shape,
        tf.zeros([0, 0, 4]),
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return begin, extent


def finish(image: tf.Tensor, resolution: int) -> tf.Tensor:
    """Resize a crop, flip it or not, at random, and scale it to [0, 1]."""
    resized = tf.image.resize(image, [resolution, resolution])
    return tf.image.random_flip_left_right(resized) / 255.0


def files_and_labels(source: Folder) -> tf.data.Dataset:
    files = tf.constant([source.where(i) for i in range(source.count)])
    labels = tf.constant([source.label(i) for i in range(source.count)], tf.int64)
    return tf.data.Dataset.from_tensor_slices((files, labels))


def decoding(source: Folder, resolution: int) -> tf.data.Dataset:
    """Make an endless dataset that decodes the crop of each picture anew."""

    def decode(file: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        data = tf.io.read_file(file)
        begin, extent = window(tf.io.extract_jpeg_shape(data))
        crop = tf.concat([begin[:2], extent[:2]], 0)
        image = tf.image.decode_and_crop_jpeg(data, crop, channels=3)
        return finish(image, resolution), label

    every = files_and_labels(source).shuffle(source.count, seed=1)
    return every.map(decode, AUTO).batch(BATCH).repeat().prefetch(AUTO)


def keeping(source: Folder, resolution: int, store: int | None) -> tf.data.Dataset:
    """Make an endless dataset that caches decoded pictures with `.cache()` and crops them.

    Args:
        store: short side of the cached pictures in pixels, the same as in the slab; None: cache
            pictures at their full size.
    """

    def whole(file: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.io.decode_jpeg(tf.io.read_file(file), channels=3), label

    def small(file: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.numpy_function(
            lambda data: decode_small(data, 3, store),
            [tf.io.read_file(file)],
            tf.uint8,
            stateful=False,
        )
        return tf.ensure_shape(image, [None, None, 3]), label

    def crop(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        begin, extent = window(tf.shape(image))
        return finish(tf.slice(image, begin, extent), resolution), label

    kept = files_and_labels(source).map(whole if store is None else small, AUTO).cache()
    return kept.shuffle(256).map(crop, AUTO).batch(BATCH).repeat().prefetch(AUTO)


def pipelines(source: Folder, resolution: int, store: int) -> dict[str, tf.data.Dataset]:
    """Make the endless datasets of plain tf.data, by the names of their rows."""
    return {
        "tfdata_decode": decoding(source, resolution),
        "tfdata_cache": keeping(source, resolution, None),
        "tfdata_cache_same": keeping(source, resolution, store),
    }
