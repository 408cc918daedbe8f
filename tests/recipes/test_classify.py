"""Scores of pictures are over all ranks, also of ranks that have none."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfcommx.recipes.tasks.classify import Classification


def test_a_rank_without_test_samples_counts_for_nothing() -> None:
    """And no samples at all are no error: all ranks end the epoch."""
    pictures = np.eye(8, dtype=np.float32)
    labels = np.array([0, 1, 2, 3, 4, 5, 6, 0])  # 7 are right
    batches = tf.data.Dataset.from_tensor_slices((pictures, labels)).batch(3)
    start = keras.Input((8,))
    score = Classification(1, 8).scorer(keras.Model(start, keras.layers.Identity()(start)))
    parts: list[np.ndarray] = []
    score(batches.take(0), lambda mine: [parts.append(mine), mine][1:])
    found = score(batches, lambda mine: [mine, *parts])
    assert found["test_accuracy"] == 7 / 8 and 7 / 8 <= found["test_top5"] <= 1
    nothing = score(batches.take(0), lambda mine: [mine, mine])
    assert nothing == {"test_accuracy": 0.0, "test_top5": 0.0}


def test_a_smaller_last_batch_is_not_traced_again() -> None:
    """Tracing a large network takes seconds; four phases of two shapes make TensorFlow complain."""
    traced: list[tuple[int | None, ...]] = []

    def model(pictures: tf.Tensor, training: bool) -> tf.Tensor:
        traced.append(tuple(pictures.shape))
        return tf.reshape(pictures, [-1, 16])

    score = Classification(1, 16).scorer(model)
    for size in (4, 2):
        pictures = tf.data.Dataset.from_tensors((tf.ones([size, 16 // size]), 0)).repeat(5)
        found = score(pictures.batch(3), lambda mine: [mine])
        assert found["test_accuracy"] == 1
    assert traced == [(None, 4, 4), (None, 2, 8)]
