"""Norms: the squared norms of many tensors in one pass, in one order of additions.

ops/kernels/norms.h has the order. It depends on nothing but a tensor's size, so every rank, device
and number of threads gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfcommx.kernels import loader

LANES, CHUNK = 64, 4096  # As in ops/kernels/norms.h


def squared_norms(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Add the squares of each tensor's entries.

    >>> squared_norms([tf.constant([3.0, 4.0]), tf.constant([[2.0]], tf.float16)]).numpy().tolist()
    [25.0, 4.0]

    Args:
        tensors: one or more, float32, float16 or bfloat16, of any shape that is known while
            tracing; an empty one has the norm 0.

    Returns:
        float32 [number of tensors]. Infinite where the sum exceeds float32 (a norm above 1.8e19)
        or an entry is infinite, NaN where an entry is NaN; entries below 1e-19 count as zero.

    **Ranks:** local; equal tensors give equal bits on every rank.
    **Cost:** reads each entry once, in one operation; 1/4096 of the entries as memory meanwhile.
    """
    ops = loader.library()
    if ops is None:
        return squared_norms_definition(tensors)
    return ops.tfcommx_squared_norms(tensors=tensors)


def squared_norms_definition(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Define `squared_norms` in plain TensorFlow."""
    return tf.stack([_squared_norm(tensor) for tensor in tensors])


def _squared_norm(tensor: tf.Tensor) -> tf.Tensor:
    flat = tf.cast(tf.reshape(tensor, [-1]), tf.float32)
    if flat.shape[0] == 0:
        return tf.constant(0.0)
    padded = tf.pad(flat, [[0, -flat.shape[0] % CHUNK]])  # Zeros change no sum
    rows = tf.unstack(tf.square(tf.reshape(padded, [-1, CHUNK // LANES, LANES])), axis=1)
    lanes = rows[0]
    for row in rows[1:]:
        lanes = lanes + row
    chunks = _fold(tf.transpose(lanes))
    return _fold(chunks)


def _fold(parts: tf.Tensor) -> tf.Tensor:
    """Add along the first dimension: the first half receives the second one, until one is left."""
    while (count := parts.shape[0]) > 1:
        half = (count + 1) // 2
        added = parts[: count - half] + parts[half:]
        parts = tf.concat([added, parts[count - half : half]], axis=0)
    return parts[0]
