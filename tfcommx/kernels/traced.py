"""Helpers for traced code: numbers on the host, new variables, order and time of results."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.kernels import loader


def int64(number: Any) -> tf.Tensor:
    """Make an int64 on the host, because kernels read it there, and would wait for one on a GPU."""
    with tf.device("/cpu:0"):
        return tf.cast(number, tf.int64)


def length(vector: tf.Tensor) -> Any:
    """Return the length of a vector: an int if it is known while tracing, otherwise a tensor."""
    static = vector.shape[0]
    return tf.size(vector) if static is None else static


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Leave the graph that is being traced, as `tf.init_scope` does, also for variables."""

    # A `tf.function` whose first trace makes a variable is traced again, because the first trace
    # contains its initializer. It does so even for variables made outside in `tf.init_scope`, which
    # need no second trace, and a large model would take twice as long to start
    def make(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        return next_creator(**{**options, "experimental_enable_variable_lifting": False})

    with tf.init_scope(), tf.variable_creator_scope(make):
        yield


def after(number: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a number >= 1 unchanged, on the host, once all tensors exist; in traced code.

    >>> int(after(tf.constant(7, tf.int64), [tf.ones([2])]))
    7

    Args:
        number: int64 or float64 [], >= 1.
        tensors: numbers or bools, of any shapes that are known while tracing.

    **Ranks:** local. **Cost:** a copy of one entry to the host; only the result waits for it.
    """
    entries = [tensor for tensor in tensors if tensor.shape.num_elements() != 0]
    if not entries:
        with tf.control_dependencies([tf.group(*tensors)]), tf.device("/cpu:0"):
            return tf.identity(number)
    # A GPU's op ends for TensorFlow once it is queued, and so does a collective of Horovod's with
    # HOROVOD_ENABLE_ASYNC_COMPLETION. An entry that was copied to the host follows all earlier work
    # in the GPU's queue
    with tf.control_dependencies([tf.group(*tensors)]):
        entry = tf.reshape(entries[0], [-1])[0]
    with tf.device("/cpu:0"):
        is_finite = tf.math.is_finite(tf.cast(entry, tf.float32))  # A bool, at most 1
        # Computed from the entry, because TensorFlow would replace an op that only waits for the
        # copy by one that waits for the GPU's op
        return tf.maximum(number, tf.cast(is_finite, number.dtype))


def stamp(tensor: tf.Tensor) -> tf.Tensor:
    """Return the time at which a tensor was ready, in seconds of `time.perf_counter`; traced code.

    >>> before = time.perf_counter()
    >>> ready = stamp(tf.ones([2, 3])).numpy()
    >>> bool(before <= ready <= time.perf_counter())
    True

    Args:
        tensor: float16, bfloat16, float32 or float64 with at least one entry.

    Returns:
        float64 []. Stamps do not wait for each other, and no op waits for them.

    **Ranks:** local. **Cost:** a copy of one entry to the host, because on a GPU the stamp must
    wait until the tensor exists and not only until it is queued. Without the library about 0.1 ms
    of Python's lock.
    """
    entry = tf.reshape(tensor, [-1])[:1]
    ops = loader.library()
    return stamp_definition(entry) if ops is None else ops.tfcommx_stamp(entry=entry)


def stamp_definition(entry: tf.Tensor) -> tf.Tensor:
    """Define `stamp` in plain TensorFlow."""
    # Not by tf.timestamp, because automatic control dependencies would chain stateful ops
    time_s = tf.numpy_function(
        lambda _: np.float64(time.perf_counter()),
        [tf.cast(entry, tf.float32)],
        tf.float64,
        stateful=False,
    )
    return tf.ensure_shape(time_s, [])
