"""Fashion-MNIST as the data set of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.base import Samples
from tfcommx.recipes.datasets.cached import Cached
from tfcommx.recipes.datasets.fashion_mnist_files import CLASSES, SIDE, fetch, load

if TYPE_CHECKING:
    import tensorflow as tf

    from tfcommx.data.cache.batch_spec import BatchSpec
    from tfcommx.data.cache.cache import DataCache


class FashionMnist(Cached):
    """60,000 + 10,000 pictures of clothes, 28 x 28 pixels in grey, and how they are varied."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    # Where its files are; None: found or fetched
    folder: Path | None = None
    # Pictures that are used, the first of each part, for trials; None: all
    limit: int | None = Field(None, ge=1)
    # Pixels of the full picture; the largest random shift of a batch, 0 for none
    shift: int = Field(1, ge=0, le=8)
    # Mirror each image left to right with probability 1/2: clothes have no left and right
    flip: bool = True

    def fetch(self) -> Path:
        """Return the folder of the files; fetch them first if they are not on this machine."""
        return fetch(self.folder)

    def build(self) -> Samples:
        """Read the files, which are fetched first if they are not on this machine.

        **Raises:** DataError for files that are missing or damaged.
        """
        from tfcommx.data.sources.arrays import Arrays

        train_x, train_y, test_x, test_y = (part[: self.limit] for part in load(self.fetch()))
        return Samples(Arrays(train_x, train_y, CLASSES, self.name), test_x, test_y, CLASSES)

    def serving(self, batch: int, resolution: int) -> BatchSpec:
        """Return how the cache serves a batch for training: mirrored, scaled, 0 to 255."""
        from tfcommx.data.cache.batch_spec import BatchSpec

        return BatchSpec(batch, resolution, flip=self.flip, std=(1 / 255,))

    def batches(self, cache: DataCache, spec: BatchSpec, epochs: range) -> tf.data.Dataset:
        """Return the training batches of some epochs: served by the cache, then shifted.

        Args:
            cache: holds the training images.
            spec: as `serving` returned it.
            epochs: numbers of the epochs, counted over the whole run: they decide the order.

        Returns:
            (float32 [batch, h, w, 1] in [0, 255], labels [batch]), one for every step.
        """
        from tfcommx.recipes.datasets.shift import training_batches

        resolution = spec.resolution or SIDE
        return training_batches(cache, spec, epochs, round(self.shift * resolution / SIDE))

    def test_inputs(self, pictures: tf.Tensor, resolution: int) -> tf.Tensor:
        """Return test pictures as the network is trained on them: float32, scaled, 0 to 255."""
        from tfcommx.recipes.datasets.shift import resize

        return resize(pictures, resolution)
