"""Batches of images for one rank: which images, in which order, how varied. A pure function of seed, epoch, step and rank."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def steps_per_epoch(count: int, ranks: int, batch: int) -> int:
    """Return the steps that every rank takes in an epoch over `count` images; the incomplete last step is left out."""
    return count // (ranks * batch)


def shard(count: int, seed: int, epoch: int, rank: int, ranks: int, batch: int) -> np.ndarray:
    """Return the images that a rank reads in an epoch.

    All ranks shuffle alike and each takes its own part of every global batch, so the ranks' shards do not overlap and
    a global batch holds the same images for any number of ranks.

    Returns: int64 [steps, batch], in [0, count).

    **Ranks:** `count`, `seed`, `epoch`, `ranks` and `batch` must agree.
    """
    steps = steps_per_epoch(count, ranks, batch)
    order = np.random.default_rng((seed, epoch)).permutation(count)[: steps * ranks * batch]
    return order.reshape(steps, ranks, batch)[:, rank]


def resize(images: tf.Tensor, resolution: int) -> tf.Tensor:
    """Return the images, uint8 or float [n, h, w, c], as float32 [n, resolution, resolution, c] in the same range of values.

    Antialiased, so that a small picture averages the full one and does not skip pixels.
    """
    if images.shape[1] != resolution or images.shape[2] != resolution:
        images = tf.image.resize(images, [resolution, resolution], "bilinear", antialias=True)
    return tf.cast(images, tf.float32)


def vary(images: tf.Tensor, seed: tf.Tensor, shift: int, flip: bool) -> tf.Tensor:
    """Shift the batch by up to `shift` pixels each way and mirror half of its images. **Source:** none; usual practice.

    Args:
        images: [n, h, w, c].
        seed: integer [2]; the same seed gives the same variation.
    """
    if shift:
        # One shift for the batch: a gather per image would cost as much as the training step of a network this small.
        images = tf.roll(images, tf.random.stateless_uniform([2], seed, -shift, shift + 1, tf.int32), axis=[1, 2])
    if flip:
        mirrored = tf.random.stateless_uniform([tf.shape(images)[0], 1, 1, 1], seed + 1) < 0.5
        images = tf.where(mirrored, images[:, :, ::-1], images)
    return images


def training_batches(images: np.ndarray, labels: np.ndarray, classes: int, *, epochs: range, resolution: int, batch: int,
                     rank: int, ranks: int, seed: int, shift: int, flip: bool, prefetch: int) -> tf.data.Dataset:
    """Make a rank's batches for some epochs, one after the other.

    Args:
        images: uint8 [count, h, w, c].
        labels: integer [count], in [0, classes).
        epochs: numbers of the epochs, counted over the whole run: they decide the order.
        batch: images a step on this rank.

    Returns: (float32 [batch, resolution, resolution, c] in [0, 255], float32 one-hot [batch, classes]), `steps_per_epoch`
        times for every epoch.
    """
    rows = np.concatenate([shard(len(images), seed, epoch, rank, ranks, batch) for epoch in epochs])
    steps = len(rows) // len(epochs)
    # Every (epoch, step, rank) draws its own numbers; two apart, because `vary` uses a seed and the next one.
    seeds = 2 * np.array([(seed, (epoch * steps + step) * ranks + rank) for epoch in epochs for step in range(steps)])
    all_images, all_labels = tf.constant(images), tf.constant(labels, tf.int32)

    def load(row: tf.Tensor, step_seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        chosen = vary(tf.gather(all_images, row), step_seed, shift, flip)
        return resize(chosen, resolution), tf.one_hot(tf.gather(all_labels, row), classes)

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1  # the pipeline must not take the cores of the other ranks' training
    return tf.data.Dataset.from_tensor_slices((rows, seeds)).map(load).prefetch(prefetch).with_options(options)
