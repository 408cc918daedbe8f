"""CPU pipelines of NVIDIA DALI, for input_pipelines.py; it needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from input_pipelines_run import AREA, ASPECT, BATCH, SEED, WORKERS, Batch, Epoch, Task, cycle, main
from nvidia.dali import fn, pipeline_def, types


def files(task: Task, folder: str) -> Any:
    """Return the nodes that read files and their labels, all shuffled before each epoch."""
    listed = task.files(folder)
    return fn.readers.file(
        files=[str(file) for file, _ in listed],
        labels=[label for _, label in listed],
        shuffle_after_epoch=True,
        name="reader",
    )


def finish(images: Any) -> Any:
    """Flip and scale to [0, 1], in one pass."""
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="HWC",
        mean=[0.0],
        std=[255.0],
        mirror=fn.random.coin_flip(probability=0.5),
    )


@pipeline_def
def decoding(task: Task) -> tuple[Any, Any]:
    data, labels = files(task, task.photos)
    crops = fn.decoders.image_random_crop(
        data, device="cpu", random_area=AREA, random_aspect_ratio=ASPECT, num_attempts=10
    )
    return finish(fn.resize(crops, size=(task.size, task.size), antialias=False)), labels


def write(task: Task) -> None:
    """Write pixels with their height, width and 3 in front, which DALI makes the shape."""
    for file, label in task.files(task.pixels):
        pixels = np.load(file)
        folder = Path(task.packed) / f"{label:03}"
        folder.mkdir(exist_ok=True)
        head = np.array(pixels.shape, np.int32).tobytes()
        (folder / f"{file.stem}.raw").write_bytes(head + pixels.tobytes())


@pipeline_def
def cropping(task: Task) -> tuple[Any, Any]:
    data, labels = files(task, task.packed)
    shape = fn.reinterpret(data[:12], dtype=types.INT32, shape=[3])
    images = fn.reinterpret(data[12:], shape, layout="HWC")
    crops = fn.random_resized_crop(
        images,
        size=(task.size, task.size),
        random_area=AREA,
        random_aspect_ratio=ASPECT,
        antialias=False,
    )
    return finish(crops), labels


def read(task: Task, definition: Any) -> Epoch:
    pipeline = definition(task, batch_size=BATCH, num_threads=WORKERS, device_id=None, seed=SEED)
    pipeline.build()

    def batches() -> Iterator[Batch]:
        while True:
            images, labels = pipeline.run()
            yield images.as_array(), labels.as_array()

    return cycle(batches(), len(task.files(task.photos)) // BATCH)


if __name__ == "__main__":
    main(
        {
            "dali": (None, lambda task: read(task, decoding)),
            "dali pixels": (write, lambda task: read(task, cropping)),
        },
        "nvidia-dali-cuda120",
    )
