"""Batches of images for one rank: served by the cache, then shifted.

A pure function of seed, epoch, step and rank.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx.data.cache.batch_spec import BatchSpec
from tfcommx.data.cache.cache import DataCache


def resize(images: tf.Tensor, resolution: int) -> tf.Tensor:
    """Scale images to a resolution, as the cache does it for training.

    Args:
        images: uint8 or float [n, h, w, c].
        resolution: pixels a side, >= 1.

    Returns:
        float32 [n, resolution, resolution, c] in the same range of values.
    """
    if images.shape[1] != resolution or images.shape[2] != resolution:
        images = tf.image.resize(images, [resolution, resolution], "bilinear", antialias=False)
    return tf.cast(images, tf.float32)


def shifted(images: tf.Tensor, seed: tf.Tensor, most: int) -> tf.Tensor:
    """Shift the batch by up to `most` pixels each way, around the edges.

    Args:
        images: [n, h, w, c].
        seed: integer [2]; the same seed gives the same shift.
        most: pixels, >= 0.

    Returns:
        [n, h, w, c], the same dtype.
    """
    # One shift for the batch: a gather per image would cost as much as the training step of a
    # network this small.
    return tf.roll(
        images, tf.random.stateless_uniform([2], seed, -most, most + 1, tf.int32), axis=[1, 2]
    )


def training_batches(
    cache: DataCache, spec: BatchSpec, epochs: range, shift: int
) -> tf.data.Dataset:
    """Make a rank's batches for some epochs, one after the other.

    Args:
        cache: serves the images.
        spec: how it serves them, with drop_remainder.
        epochs: numbers of the epochs, counted over the whole run: they decide the order.
        shift: largest shift, pixels of what is served; 0: none.

    Returns:
        (spec.dtype [batch, h, w, c], labels [batch]), `cache.steps(spec)` times for every epoch.
    """

    def finish(
        number: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        pictures, labels = batch
        if shift:
            # Every (epoch, step, rank) draws its own
            seed = tf.stack([cache.options.seed, number * cache.topology.size + cache.rank])
            pictures = shifted(pictures, seed, shift)
        return pictures, labels

    options = tf.data.Options()
    # The pipeline must not take the cores of the other ranks' training
    options.threading.private_threadpool_size = 1
    batches = (
        cache.dataset(spec, epochs.start, len(epochs))
        .enumerate(epochs.start * cache.steps(spec))
        .map(finish)
    )
    return batches.with_options(options)
