"""Pipelines with PyTorch's DataLoader, for input_pipelines.py: torchvision, webdataset, streaming.

It runs in an environment with PyTorch and without TensorFlow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from input_pipelines_run import AREA, ASPECT, BATCH, SEED, WORKERS, Batch, Epoch, Task, main
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

SHARDS = 8
# Arrays of MDS files are read-only, and nothing writes to their tensors
warnings.filterwarnings("ignore", "The given NumPy array is not writable")


def transform(size: int) -> v2.Compose:
    """Return the transform that torchvision's page on performance recommends, of uint8 tensors."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, AREA, ASPECT, antialias=True),
            v2.RandomHorizontalFlip(),
        ]
    )


def jpeg_tensor(data: bytes) -> torch.Tensor:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return decode_jpeg(buffer, mode=ImageReadMode.RGB)


def pixel_tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def epochs(loader: Iterable[Any]) -> Epoch:
    """Return the epochs of a loader of uint8 batches, which are scaled to float32 in [0, 1]."""
    scale = v2.ToDtype(torch.float32, scale=True)

    def epoch() -> Iterable[Batch]:
        return ((scale(images).numpy(), labels.numpy()) for images, labels in loader)

    return epoch


def loading(dataset: Dataset, **more: Any) -> Epoch:
    return epochs(
        DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, **more)
    )


def read_folder(task: Task) -> Epoch:
    def load(path: str) -> torch.Tensor:
        return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)

    photos = datasets.ImageFolder(task.photos, transform(task.size), loader=load)
    return loading(photos, shuffle=True)


def read_pixels(task: Task) -> Epoch:
    def load(path: str) -> torch.Tensor:
        return pixel_tensor(np.load(path))

    return loading(
        datasets.DatasetFolder(task.pixels, load, (".npy",), transform(task.size)), shuffle=True
    )


def write_tars(task: Task) -> None:
    with webdataset.ShardWriter(
        f"{task.packed}/%06d.tar", maxcount=len(task.files(task.photos)) // SHARDS
    ) as shards:
        for place, (file, label) in enumerate(task.mixed(task.photos)):
            shards.write({"__key__": f"{place:06}", "jpg": file.read_bytes(), "cls": label})


def read_tars(task: Task) -> Epoch:
    augment = transform(task.size)
    shards = sorted(map(str, Path(task.packed).glob("*.tar")))
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=SHARDS, seed=SEED)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(lambda data: augment(jpeg_tensor(data)), int)
        .batched(BATCH)
    )
    return epochs(
        webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    )


class Streamed(StreamingDataset):
    """Samples of MosaicML streaming, augmented."""

    def __init__(self, task: Task, to_tensor: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(local=task.packed, shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
        self.augment, self.to_tensor = transform(task.size), to_tensor

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        sample = super().__getitem__(at)
        return self.augment(self.to_tensor(sample["image"])), sample["label"]


def write_mds(task: Task) -> None:
    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=task.packed, columns=columns) as writer:
        for file, label in task.mixed(task.photos):
            writer.write({"image": file.read_bytes(), "label": label})


def write_mds_pixels(task: Task) -> None:
    columns = {"image": "ndarray:uint8", "label": "int"}
    with MDSWriter(out=task.packed, columns=columns) as writer:
        for file, label in task.mixed(task.pixels):
            writer.write({"image": np.load(file), "label": label})


if __name__ == "__main__":
    main(
        {
            "torchvision": (None, read_folder),
            "torchvision pixels": (None, read_pixels),
            "webdataset": (write_tars, read_tars),
            "streaming": (write_mds, lambda task: loading(Streamed(task, jpeg_tensor))),
            "streaming pixels": (
                write_mds_pixels,
                lambda task: loading(Streamed(task, pixel_tensor)),
            ),
        },
        "torch",
        "torchvision",
        "webdataset",
        "mosaicml-streaming",
    )
