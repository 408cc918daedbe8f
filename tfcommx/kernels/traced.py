"""In traced code: numbers on the host, new variables, the order and the time of results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.kernels import loader


def int64(number: Any) -> tf.Tensor:
    """Make an int64 on the host: kernels read it there, and on a GPU the host would wait for it."""
    with tf.device("/cpu:0"):
        return tf.cast(number, tf.int64)


def length(vector: tf.Tensor) -> Any:
    """Return the length of a vector: an int if it is known while tracing, else a tensor."""
    static = vector.shape[0]
    return tf.size(vector) if static is None else static


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Leave the graph that is being traced, as `tf.init_scope` does; variables included.

    A `tf.function` whose first trace makes a variable is traced again, because the first trace has
    the initializers in it. It counts those that `tf.init_scope` has made outside as well, which
    need no second trace: a large model would take twice as long to start.
    """

    def make(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        return next_creator(**{**options, "experimental_enable_variable_lifting": False})

    with tf.init_scope(), tf.variable_creator_scope(make):
        yield


def after(number: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a number >= 1 as it is, on the host, once all tensors exist; in traced code.

    >>> int(after(tf.constant(7, tf.int64), [tf.ones([2])]))
    7

    A GPU's op ends for TensorFlow once it is queued, and so does a collective of Horovod's with
    HOROVOD_ENABLE_ASYNC_COMPLETION. An entry that has been copied to the host cannot have come
    before what was queued on the GPU earlier.

    Args:
        number: int64 or float64 [], >= 1.
        tensors: of any shapes that are known while tracing, of numbers or bools.

    **Ranks:** local. **Cost:** one entry is copied to the host; only the result waits for it.
    """
    entries = [one for one in tensors if one.shape.num_elements() != 0]
    if not entries:
        with tf.control_dependencies([tf.group(*tensors)]), tf.device("/cpu:0"):
            return tf.identity(number)
    with tf.control_dependencies([tf.group(*tensors)]):
        entry = tf.reshape(entries[0], [-1])[0]
    with tf.device("/cpu:0"):
        there = tf.math.is_finite(tf.cast(entry, tf.float32))  # True or false, so 1 at most
        # An op that only waits for the copy would be replaced by one that waits for the GPU's op
        return tf.maximum(number, tf.cast(there, number.dtype))


def stamp(tensor: tf.Tensor) -> tf.Tensor:
    """Return when a tensor was ready, in traced code: seconds of `time.perf_counter`.

    >>> before = time.perf_counter()
    >>> found = stamp(tf.ones([2, 3])).numpy()
    >>> bool(before <= found <= time.perf_counter())
    True

    Args:
        tensor: float16, bfloat16, float32 or float64 with at least one entry.

    Returns:
        float64 []. Stamps do not wait for each other, nor does anything wait for them.

    **Ranks:** local. **Cost:** one entry is copied to the host, so on a GPU the stamp waits until
    the tensor is made, and not only asked for. Without the library some 0.1 ms of Python's lock.
    """
    entry = tf.reshape(tensor, [-1])[:1]
    ops = loader.library()
    return stamp_definition(entry) if ops is None else ops.tfcommx_stamp(entry=entry)


def stamp_definition(entry: tf.Tensor) -> tf.Tensor:
    """Define `stamp` in plain TensorFlow.

    Not by tf.timestamp, which is stateful: automatic control dependencies would chain the stamps.
    """
    now = tf.numpy_function(
        lambda _: np.float64(time.perf_counter()),
        [tf.cast(entry, tf.float32)],
        tf.float64,
        stateful=False,
    )
    return tf.ensure_shape(now, [])
