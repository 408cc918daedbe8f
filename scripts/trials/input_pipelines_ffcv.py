"""Pipelines of FFCV, for input_pipelines.py, in an environment with PyTorch."""

from __future__ import annotations

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor
from ffcv.writer import DatasetWriter
from input_pipelines_run import AREA, ASPECT, BATCH, SEED, WORKERS, Epoch, Task, main
from PIL import Image


class Photos:
    """The photographs, as a DatasetWriter reads them."""

    def __init__(self, task: Task, folder: str) -> None:
        self.files = task.mixed(folder)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, at: int) -> tuple[np.ndarray, int]:
        file, label = self.files[at]
        if file.suffix == ".npy":
            return np.load(file), label
        return np.asarray(Image.open(file).convert("RGB")), label


def write(task: Task, mode: str, folder: str) -> None:
    """Write what FFCV reads: JPEGs of quality 90, which it makes anew, or pixels."""
    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=90), "label": IntField()}
    writer = DatasetWriter(f"{task.packed}/photos.beton", fields, num_workers=WORKERS)
    writer.from_indexed_dataset(Photos(task, folder))


def read(task: Task) -> Epoch:
    black, white = np.zeros(3), np.full(3, 255.0)
    decode = RandomResizedCropRGBImageDecoder((task.size, task.size), AREA, ASPECT)
    images = [
        decode,
        RandomHorizontalFlip(),
        NormalizeImage(black, white, np.float32),
        ToTensor(),
    ]
    loader = Loader(
        f"{task.packed}/photos.beton",
        batch_size=BATCH,
        num_workers=WORKERS,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        seed=SEED,
        pipelines={"image": images, "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )
    return lambda: ((images.numpy(), labels.numpy()) for images, labels in loader)


if __name__ == "__main__":
    main(
        {
            "ffcv": (lambda task: write(task, "jpg", task.photos), read),
            "ffcv pixels": (lambda task: write(task, "raw", task.pixels), read),
            "ffcv whole pixels": (lambda task: write(task, "raw", task.photos), read),
        },
        "ffcv",
        "numba",
        "torch",
    )
