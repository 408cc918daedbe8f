"""Stamps of a step are of results that exist, also where an op ends when it is only queued."""

from __future__ import annotations

import time

import pytest
import tensorflow as tf

from tfcommx.training import steps


@pytest.mark.parametrize("queued", [True, False])
def test_a_stamp_is_the_time_after_its_tensors(
    queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous completion the clock was read when the exchange had been queued."""
    waited: list[list[tf.Tensor]] = []
    after = steps.after

    def noted(number: tf.Tensor, tensors: list[tf.Tensor]) -> tf.Tensor:
        waited.append(tensors)
        return after(number, tensors)

    monkeypatch.setattr(steps, "after", noted)
    stamp = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    @tf.function(autograph=False)
    def step(value: tf.Tensor) -> tf.Tensor:
        gradients = [tf.square(value), tf.IndexedSlices(value[:, None], tf.range(3))]
        with steps._stamped(stamp, gradients, queued):
            return tf.identity(value)

    before = time.time()
    step(tf.ones([3]))
    assert before <= stamp.numpy() <= time.time()
    assert list(map(len, waited)) == [3] * queued
