"""Shifts batches of pictures: a pure function of a seed."""

from __future__ import annotations

import tensorflow as tf


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
