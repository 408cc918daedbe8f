"""Photographs in files: ImageNet's shards, class folders, data sets of TensorFlow Datasets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.base import Data, Place
from tfcommx.recipes.datasets.picture_dataset import IMAGENET_MEAN, IMAGENET_STD, PictureDataset

if TYPE_CHECKING:
    from tfcommx.data.sources.base import Source

IMAGENET_CLASSES = 1000


class Photos(PictureDataset):
    """Usual settings of photographs: random crops in training, centre crops in evaluation."""

    crop: Literal["random", "center", "whole"] = "random"
    test_crop: Literal["center", "whole"] = "center"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def open(
        self, train: Source, test: Source, place: Place, classes: tuple[str, ...] = ()
    ) -> Data:
        """Open two sources on this rank, with these names of the classes or their own."""
        from tfcommx.recipes.datasets.pictures import Pictures

        return Pictures(self, train, test, place, classes=classes)


class ImageNet(Photos):
    """ImageNet 2012 in its usual shards, train-00000-of-01024 and validation-00000-of-00128."""

    name: Literal["imagenet"] = "imagenet"
    # Holds all shards
    folder: Path

    def fetch(self) -> Path:
        """Return the folder; under ImageNet's licence you download it yourself."""
        return self.folder

    def build(self, place: Place) -> Data:
        """Open the shards on this rank. **Raises:** PlanError for missing shards."""
        from tfcommx.data.sources.tfrecord import imagenet

        train, test = (imagenet(self.folder, split) for split in ("train", "validation"))
        # The shards hold numbers only
        return self.open(train, test, place, tuple(map(str, range(IMAGENET_CLASSES))))


class ClassFolders(Photos):
    """A folder with one folder for each split, and in these one for each class."""

    name: Literal["folder"] = "folder"
    folder: Path
    # Names of the two folders inside
    train: str = "train"
    test: str = "test"

    def fetch(self) -> Path:
        return self.folder

    def build(self, place: Place) -> Data:
        """Open the folders on this rank. **Raises:** PlanError if there are no pictures."""
        from tfcommx.data.sources.folder import Folder

        return self.open(Folder(self.folder / self.train), Folder(self.folder / self.test), place)


class TensorFlowDataset(Photos):
    """A data set of TensorFlow Datasets by name, such as imagenette/160px-v2.

    Prepare it before a run: otherwise every rank would download it.
    """

    name: Literal["tfds"] = "tfds"
    dataset: str = Field(min_length=1)
    train: str = "train"
    test: str = "test"
    # Where it is prepared; None: the library's own choice
    folder: Path | None = None

    def fetch(self) -> Path | None:
        """Download and prepare the data set, unless that has been done."""
        from tfcommx.data.sources.tfrecord import tfds

        tfds(self.dataset, self.train, self.folder)
        return self.folder

    def build(self, place: Place) -> Data:
        """Open it on this rank. **Raises:** PlanError for unknown data sets and splits."""
        from tfcommx.data.sources.tfrecord import tfds

        train, test = (tfds(self.dataset, split, self.folder) for split in (self.train, self.test))
        return self.open(train, test, place)
