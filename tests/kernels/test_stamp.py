"""Stamps have the time when a tensor is ready, native and by definition, and wait for no other."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.kernels import loader
from tfcommx.kernels.traced import stamp, stamp_definition


def late(value: tf.Tensor, seconds: float) -> tf.Tensor:
    def wait(one: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return one

    return tf.ensure_shape(
        tf.numpy_function(wait, [value], value.dtype, stateful=False), value.shape
    )


@pytest.mark.parametrize("native", [True, False], ids=["native", "definition"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_stamp_is_the_time_at_which_its_tensor_is_made(native: bool, dtype: str) -> None:
    assert loader.library() is not None
    read = stamp if native else lambda one: stamp_definition(tf.reshape(one, [-1])[:1])

    @tf.function(autograph=False)
    def step(value: tf.Tensor) -> tf.Tensor:
        first = tf.cast(value, dtype)
        second = tf.cast(late(value, 0.5), dtype)
        # The later one first: a stamp does not wait for the one before it
        return tf.stack([read(second), read(first)])

    step(tf.ones([3, 2]))  # traced
    before = time.perf_counter()
    slow, fast = step(tf.ones([3, 2])).numpy()
    assert before <= fast and slow <= time.perf_counter()
    assert slow - before >= 0.5 and fast < slow
