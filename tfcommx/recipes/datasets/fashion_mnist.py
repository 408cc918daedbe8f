"""Fashion-MNIST in a recipe: its settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.base import Data, Place
from tfcommx.recipes.datasets.fashion_mnist_files import CLASSES, SIDE, fetch, load
from tfcommx.recipes.datasets.picture_dataset import PictureDataset

if TYPE_CHECKING:
    import tensorflow as tf


class FashionMnist(PictureDataset):
    """60,000 + 10,000 pictures of clothes, 28 x 28 pixels in grey, and their augmentation.

    At a resolution above 28 they are enlarged.
    """

    name: Literal["fashion_mnist"] = "fashion_mnist"
    # Where its files are; None: found or fetched
    folder: Path | None = None
    # Pictures to train with, the first ones; None: all 60,000
    limit: int | None = Field(None, ge=1)
    # Pictures to evaluate with, the first ones; None: all 10,000
    test_limit: int | None = Field(None, ge=1)
    # Largest random shift of a batch, pixels of the full picture; 0 for none
    shift: int = Field(1, ge=0, le=8)

    def fetch(self) -> Path:
        return fetch(self.folder)

    def build(self, place: Place) -> Data:
        from tfcommx.data.sources.arrays import Arrays
        from tfcommx.recipes.datasets.pictures import Pictures

        train_x, train_y, test_x, test_y = load(self.fetch())
        used, tested = slice(self.limit), slice(self.test_limit)
        return Pictures(
            self,
            Arrays(train_x[used], train_y[used], CLASSES, self.name),
            Arrays(test_x[tested], test_y[tested], CLASSES, f"{self.name} test"),
            place,
            self._shifted if self.shift else None,
        )

    def _shifted(self, pictures: tf.Tensor, seed: tf.Tensor, resolution: int) -> tf.Tensor:
        """Shift a batch by up to `shift` pixels of the full picture."""
        from tfcommx.recipes.datasets.pictures import shifted

        return shifted(pictures, seed, round(self.shift * resolution / SIDE))
