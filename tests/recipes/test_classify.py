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


def test_one_of_equal_logits_is_the_answer() -> None:
    """Each of them counted, so that a network with equal outputs was always right."""
    logits = tf.cast(tf.stack([tf.zeros(10), tf.one_hot(9, 10)]), tf.bfloat16)
    score = Classification(1, 10).scorer(lambda pictures, training: tf.gather(logits, pictures))
    for row in (0, 1):
        batches = tf.data.Dataset.from_tensors(([row] * 10, np.arange(10)))
        assert score(batches, lambda mine: [mine]) == {"test_accuracy": 0.1, "test_top5": 0.5}


def test_no_class_is_right_beside_a_nan() -> None:
    logits = tf.constant([[2.0, 1, 0, np.nan, 0, 0], [np.nan] * 6, [np.inf, 0, 0, 0, 0, 0]])
    score = Classification(1, 6).scorer(lambda pictures, training: pictures)
    batches = tf.data.Dataset.from_tensors((logits, tf.zeros(3, tf.int64)))
    assert score(batches, lambda mine: [mine]) == {"test_accuracy": 0.0, "test_top5": 0.0}
