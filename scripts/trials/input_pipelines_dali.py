"""CPU pipelines of NVIDIA DALI, for input_pipelines.py; it needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from input_pipelines_run import AREA, ASPECT, BATCH, SEED, WORKERS, Batch, Epoch, Task, cycle, main
from nvidia.dali import fn, pipeline_def, types

# Where the height begins in a packed label, below the class: 12 bits, and 12 for the width
HEIGHT, SIDE = 12, 4095


def read_files(listed: list[tuple[Path, int]]) -> Any:
    """Return the nodes of files and their labels, all of them shuffled before each epoch."""
    return fn.readers.file(
        files=[str(file) for file, _ in listed],
        labels=[label for _, label in listed],
        shuffle_after_epoch=True,
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
    data, labels = read_files(task.files(task.photos))
    crops = fn.decoders.image_random_crop(
        data, device="cpu", random_area=AREA, random_aspect_ratio=ASPECT, num_attempts=10
    )
    return finish(fn.resize(crops, size=(task.size, task.size), antialias=False)), labels


def write(task: Task) -> None:
    """Write pixels as they are, without a header that DALI would have to cut off by copying."""
    for place, (file, label) in enumerate(task.files(task.pixels)):
        pixels = np.load(file)
        height, width, _ = pixels.shape
        packed = (label << 2 * HEIGHT) + (height << HEIGHT) + width
        (Path(task.packed) / f"{place:06}_{packed}.raw").write_bytes(pixels.tobytes())


@pipeline_def
def cropping(task: Task) -> tuple[Any, Any]:
    packed = [(file, int(file.stem.split("_")[1])) for file in sorted(Path(task.packed).iterdir())]
    data, labels = read_files(packed)
    shape = fn.cat((labels >> HEIGHT) & SIDE, labels & SIDE, np.int32([3]))
    images = fn.reinterpret(data, shape, layout="HWC")
    crops = fn.random_resized_crop(
        images,
        size=(task.size, task.size),
        random_area=AREA,
        random_aspect_ratio=ASPECT,
        antialias=False,
    )
    return finish(crops), labels >> 2 * HEIGHT


def read(task: Task, definition: Any) -> Epoch:
    pipeline = definition(task, batch_size=BATCH, num_threads=WORKERS, device_id=None, seed=SEED)
    pipeline.build()

    def batches() -> Iterator[Batch]:
        while True:
            images, labels = pipeline.run()
            # Views, because as_array copies
            yield np.asarray(images.as_tensor()), np.asarray(labels.as_tensor())

    return cycle(batches(), len(task.files(task.photos)) // BATCH)


if __name__ == "__main__":
    main(
        {
            "dali": (None, lambda task: read(task, decoding)),
            "dali pixels": (write, lambda task: read(task, cropping)),
        },
        "nvidia-dali-cuda120",
    )
