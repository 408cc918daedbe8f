"""Pipelines of Grain with ArrayRecord, for input_pipelines.py; OpenCV decodes and resizes."""

from __future__ import annotations

import struct
from collections.abc import Callable

import cv2
import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from input_pipelines_run import AREA, ASPECT, BATCH, SEED, WORKERS, Epoch, Task, cycle, main

# Label, height, width, in front of the pixels; only the label counts for a JPEG
HEAD, HEAD_BYTES = "<3i", 12


def write(task: Task, folder: str) -> None:
    """Write one record a photograph; groups of one, as random access needs them."""
    writer = ArrayRecordWriter(f"{task.packed}/photos.array_record", "group_size:1,uncompressed")
    for file, label in task.mixed(folder):
        if file.suffix == ".npy":
            pixels = np.load(file)
            writer.write(struct.pack(HEAD, label, *pixels.shape[:2]) + pixels.tobytes())
        else:
            writer.write(struct.pack(HEAD, label, 0, 0) + file.read_bytes())
    writer.close()


def decoded(record: bytes) -> np.ndarray:
    data = np.frombuffer(record, np.uint8, offset=HEAD_BYTES)
    return cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)


def unpacked(record: bytes) -> np.ndarray:
    _, height, width = struct.unpack_from(HEAD, record)
    return np.frombuffer(record, np.uint8, offset=HEAD_BYTES).reshape(height, width, 3)


class Augment(grain.transforms.RandomMap):
    """Random-resized-crop and flip."""

    def __init__(self, size: int, pixels: Callable[[bytes], np.ndarray]) -> None:
        self.size, self.pixels = size, pixels

    def random_map(self, record: bytes, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        image = self.pixels(record)
        top, left, height, width = window(rng, *image.shape[:2])
        crop = image[top : top + height, left : left + width]
        crop = cv2.resize(crop, (self.size, self.size), interpolation=cv2.INTER_LINEAR)
        if rng.random() < 0.5:
            crop = cv2.flip(crop, 1)
        return np.multiply(crop, np.float32(1 / 255), dtype=np.float32), struct.unpack_from(
            HEAD, record
        )[0]


def window(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
    """Draw top, left, height and width, as torchvision does; the whole picture if ten fail."""
    for _ in range(10):
        area = rng.uniform(*AREA) * height * width
        aspect = np.exp(rng.uniform(*np.log(ASPECT)))
        w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    return 0, 0, height, width


def read(task: Task, pixels: Callable[[bytes], np.ndarray]) -> Epoch:
    cv2.setNumThreads(0)  # Because the pipeline is parallel already
    source = grain.sources.ArrayRecordDataSource([f"{task.packed}/photos.array_record"])
    batches = (
        grain.MapDataset.source(source)
        .seed(SEED)
        .shuffle()
        .repeat(task.epochs)
        .random_map(Augment(task.size, pixels))
        .batch(BATCH)
        .to_iter_dataset(grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * WORKERS))
    )
    return cycle(iter(batches), len(source) // BATCH)


if __name__ == "__main__":
    main(
        {
            "grain": (lambda task: write(task, task.photos), lambda task: read(task, decoded)),
            "grain pixels": (
                lambda task: write(task, task.pixels),
                lambda task: read(task, unpacked),
            ),
        },
        "grain",
        "array_record",
        "opencv-python-headless",
    )
