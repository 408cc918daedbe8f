"""Pictures in arrays: a NumPy file, or what a user's function returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfcommx.recipes.base import Data, Place
from tfcommx.recipes.datasets.cached import Cached
from tfcommx.recipes.datasets.idx import DataError

ENTRIES = ("train_images", "train_labels", "test_images", "test_labels")


class ArrayFile(Cached):
    """Pictures of one size in a NumPy file (`np.savez`).

    Its entries are train_images uint8 [n, h, w, c] or [n, h, w], train_labels [n], test_images and
    test_labels.
    """

    name: Literal["arrays"] = "arrays"
    file: Path
    # Names of the classes in the order of their numbers; empty: their numbers
    classes: tuple[str, ...] = ()

    def fetch(self) -> Path:
        """Return the folder of the file."""
        return self.file.parent

    def build(self, place: Place) -> Data:
        """Open the file on this rank. **Raises:** DataError if it is not as it must be."""
        try:
            with np.load(self.file) as content:
                missing = [entry for entry in ENTRIES if entry not in content]
                arrays = [content[entry] for entry in ENTRIES if entry in content]
        except (OSError, ValueError) as error:
            raise DataError(
                f"A NumPy file is required in {self.file}: {error}. Write it with np.savez."
            ) from error
        if missing:
            raise DataError(
                f"{self.file} needs the entries {', '.join(ENTRIES)}. Missing: "
                f"{', '.join(missing)}. Write it with np.savez."
            )
        return open_arrays((arrays[0], arrays[1]), (arrays[2], arrays[3]), place, self)


class Settings(Cached):
    """How arrays are kept and served that no file was named for."""

    name: Literal["arrays"] = "arrays"
    classes: tuple[str, ...] = ()


def open_arrays(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    place: Place,
    settings: Cached | None = None,
    **options: Any,
) -> Data:
    """Open pictures that are in memory: what a user's own data set can return.

    Args:
        train: images uint8 [n, h, w, c] or [n, h, w], and labels [n].
        test: the same for evaluation.
        place: as the function received it.
        settings: how they are kept and served; None: of `options`.
        options: fields of `Cached`, such as `flip=True`, and `classes`, the names of the labels.

    **Ranks:** every rank opens the same arrays; the node keeps one copy.
    """
    from tfcommx.data.sources.arrays import Arrays
    from tfcommx.recipes.datasets.pictures import Pictures

    settings = settings or Settings(**options)
    classes: Sequence[str] = getattr(settings, "classes", ())
    if not classes:
        classes = [str(label) for label in range(int(max(train[1])) + 1)]
    for images, labels in (train, test):
        if not 0 <= np.min(labels) <= np.max(labels) < len(classes):
            raise DataError(
                f"Labels must be in [0, {len(classes)}), the number of classes. Received labels "
                f"from {np.min(labels)} to {np.max(labels)} for {len(images)} pictures."
            )
    sources = [
        Arrays(np.asarray(images), np.asarray(labels), tuple(classes), name)
        for (images, labels), name in ((train, "training arrays"), (test, "test arrays"))
    ]
    return Pictures(settings, *sources, place)
