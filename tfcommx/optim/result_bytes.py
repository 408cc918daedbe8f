"""Results of any dtypes as one vector of bytes, with a head that says whether there are any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

HEAD = 512  # Bytes of the head: the text of an error, padded with zeros; all zeros: none


def size_bytes(spec: tf.TensorSpec) -> int:
    """Return the bytes of a result."""
    return spec.shape.num_elements() * spec.dtype.size


def head_of(text: str) -> tf.Tensor:
    """Return the head, uint8 [HEAD], of a share that failed with this text; "": that did not."""
    written = text.encode("ascii", "replace").replace(b"\0", b" ")[:HEAD]
    return tf.constant(np.frombuffer(written.ljust(HEAD, b"\0"), np.uint8))


def outcome_of(heads: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return whether any share failed, and the text of the first that did.

    Args:
        heads: uint8 [shares, HEAD].
    """
    failed = heads[:, 0] != 0
    first = tf.gather(heads, tf.argmax(tf.cast(failed, tf.int32)))
    letters = tf.cast(tf.boolean_mask(first, first != 0), tf.int32)
    return tf.reduce_any(failed), tf.strings.unicode_encode(letters, "UTF-8")


def pack(results: Sequence[tf.Tensor], width: int) -> tf.Tensor:
    """Return the bytes of some results one after another, padded to uint8 [width]."""
    parts = [_to_bytes(result) for result in results]
    used = sum(part.shape[0] for part in parts)
    return tf.concat([*parts, tf.zeros([width - used], tf.uint8)], axis=0)


def unpack(row: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Return the results of these shapes and dtypes that `pack` made a row of."""
    sizes = [size_bytes(spec) for spec in specs]
    parts = tf.split(row, [*sizes, row.shape[0] - sum(sizes)])
    return [_from_bytes(part, spec) for part, spec in zip(parts, specs, strict=False)]


def _to_bytes(result: tf.Tensor) -> tf.Tensor:
    result = tf.convert_to_tensor(result)
    if result.dtype.size == 1:
        same = tf.cast(result, tf.uint8) if result.dtype == tf.bool else result
        return tf.reshape(tf.bitcast(same, tf.uint8), [-1])
    return tf.reshape(tf.bitcast(result, tf.uint8), [-1])


def _from_bytes(part: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype == tf.bool:
        return tf.reshape(part != 0, spec.shape)
    if spec.dtype.size == 1:
        return tf.bitcast(tf.reshape(part, spec.shape), spec.dtype)
    return tf.bitcast(tf.reshape(part, [*spec.shape, spec.dtype.size]), spec.dtype)
