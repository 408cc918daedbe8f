"""Small numbers that kernels read on the host, so that it never waits for a GPU."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def int64(number: Any) -> tf.Tensor:
    """Make an int64 on the host: kernels read it there, and on a GPU the host would wait for it."""
    with tf.device("/cpu:0"):
        return tf.cast(number, tf.int64)


def length(vector: tf.Tensor) -> Any:
    """Return the length of a vector: an int if it is known while tracing, else a tensor."""
    static = vector.shape[0]
    return tf.size(vector) if static is None else static
