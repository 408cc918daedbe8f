"""Pictures in NumPy arrays, ImageNet's shards, class folders and TensorFlow Datasets."""

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from tfcommx.core import DataError, TfcommxError, reading
from tfcommx.data.sources import Arrays, Folder, Source, tfrecord
from tfcommx.recipes.datasets.picture_dataset import IMAGENET_MEAN, IMAGENET_STD, PictureDataset
from tfcommx.recipes.families import Data, DataRank

# Largest number of classes without names, which limits the outputs that a wrong label can cause
MOST_CLASSES = 1_000_000
ENTRIES = ("train_images", "train_labels", "test_images", "test_labels")


class ArrayPictures(PictureDataset):
    """Pictures in memory, and their settings."""

    name: Literal["arrays"] = "arrays"
    # Names of the classes by number; empty: the numbers themselves
    classes: tuple[str, ...] = ()


class ArrayFile(ArrayPictures):
    """Pictures of one size in a NumPy file (`np.savez`).

    Its entries are train_images uint8 [n, h, w, c] or [n, h, w], train_labels [n], test_images and
    test_labels.
    """

    file: Path

    def build(self, place: DataRank) -> Data:
        """Open the file on this rank. **Raises:** DataError for a file of another kind."""
        with (
            reading("A NumPy file", self.file, "Write it with np.savez.", DataError),
            np.load(self.file) as content,
        ):
            missing = [entry for entry in ENTRIES if entry not in content]
            arrays = [content[entry] for entry in ENTRIES if entry in content]
        if missing:
            raise DataError(
                f"{self.file} needs the entries {', '.join(ENTRIES)}. Missing: "
                f"{', '.join(missing)}. Write it with np.savez."
            )
        train, test = (arrays[0], arrays[1]), (arrays[2], arrays[3])
        return _open(train, test, place, self, f"{self.file}: ")


def open_arrays(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    place: DataRank,
    **options: Any,
) -> Data:
    """Open pictures that are in memory, such as those of a user's own data set.

    Args:
        train: images uint8 [n, h, w, c] or [n, h, w], and labels [n].
        test: the same for evaluation.
        place: the argument `place` that the user's function received.
        options: fields of `PictureDataset` such as `flip=True`, and `classes`, the label names.

    **Ranks:** every rank opens the same arrays; the node keeps one copy.
    """
    return _open(train, test, place, ArrayPictures(**options))


def _open(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    place: DataRank,
    settings: ArrayPictures,
    origin: str = "",
) -> Data:
    """Open arrays on this rank; error messages about them begin with `origin`."""
    from tfcommx.recipes.datasets.pictures import Pictures

    training = _source(*train, settings.classes, f"{origin}training arrays")
    classes = training.classes = settings.classes or _numbered_classes(training)
    return Pictures(settings, training, _source(*test, classes, f"{origin}test arrays"), place)


def _numbered_classes(train: Arrays) -> tuple[str, ...]:
    """Return the numbers 0 to the largest label, as names; warn of numbers without pictures.

    **Raises:** DataError for more than MOST_CLASSES.
    """
    numbers = np.unique(train.labels)
    count = int(numbers[-1]) + 1
    if count > MOST_CLASSES:
        raise DataError(
            f"{train.name}: labels below {MOST_CLASSES:,} are required, or `classes`. Received "
            f"labels up to {count - 1:,}. Number the classes from 0."
        )
    if len(numbers) < count:
        absent = np.setdiff1d(np.arange(count), numbers)
        warnings.warn(
            f"{train.name}: of the labels 0 to {count - 1}, {len(absent)} have no pictures, such "
            f"as {int(absent[0])}. The network has an output for each. Number the classes from 0, "
            "leave out pictures with the label of no class, or name all `classes`.",
            stacklevel=5,
        )
    return tuple(map(str, range(count)))


def _source(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], name: str) -> Arrays:
    """Return a source of these pictures. **Raises:** DataError without pictures or labels."""
    try:
        source = Arrays(np.asarray(images), np.asarray(labels), classes, name)
    except TfcommxError as error:
        raise DataError(f"{name}: {error}") from error
    if not source.count:
        raise DataError(f"{name}: pictures are required. There are none. Add some.")
    return source


class Photos(PictureDataset):
    """Default settings of photographs: random crops in training, centre crops in evaluation."""

    crop: Literal["random", "center", "whole"] = "random"
    test_crop: Literal["center", "whole"] = "center"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def open(self, train: Source, test: Source, place: DataRank) -> Data:
        """Open two sources on this rank."""
        from tfcommx.recipes.datasets.pictures import Pictures

        return Pictures(self, train, test, place)


class ImageNet(Photos):
    """ImageNet 2012 in its usual shards, train-00000-of-01024 and validation-00000-of-00128."""

    channels = 3

    name: Literal["imagenet"] = "imagenet"
    # Folder of all shards, which you download yourself because of ImageNet's licence
    folder: Path

    def build(self, place: DataRank) -> Data:
        """Open the shards on this rank. **Raises:** DataError for missing shards."""
        train, test = (tfrecord.imagenet(self.folder, split) for split in ("train", "validation"))
        return self.open(train, test, place)


class ClassFolders(Photos):
    """A folder with a folder for each split, each of which has a folder for each class."""

    channels = 3

    name: Literal["folder"] = "folder"
    folder: Path
    # Names of the folders of the two splits
    train: str = "train"
    test: str = "test"

    def build(self, place: DataRank) -> Data:
        """Open the folders on this rank. **Raises:** DataError if there are no pictures."""
        return self.open(Folder(self.folder / self.train), Folder(self.folder / self.test), place)


class TensorFlowDataset(Photos):
    """A data set of TensorFlow Datasets by name, such as imagenette/160px-v2.

    Prepare it before a run, because otherwise every rank downloads it.
    """

    name: Literal["tfds"] = "tfds"
    dataset: str = Field(min_length=1)
    train: str = "train"
    test: str = "test"
    # Folder of prepared data sets; None: the library's default
    folder: Path | None = None

    def build(self, place: DataRank) -> Data:
        """Open it on this rank. **Raises:** DataError for unknown data sets and splits."""
        train, test = (
            tfrecord.tfds(self.dataset, split, self.folder) for split in (self.train, self.test)
        )
        return self.open(train, test, place)
