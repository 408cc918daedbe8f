"""Pack results of any dtype, or the text of an error, into one vector of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

HEAD = 512  # Bytes of the head: the text of an error, padded with zeros; all zeros: none


def computed(
    op: Callable[[list[Any]], Sequence[tf.Tensor]], items: list[Any], width: int, rank: int
) -> tf.Tensor:
    """Compute op of a share's items; return head and results, uint8 [HEAD + width].

    Runs eagerly, because a compiled function inside of an operation of the step would wait forever
    for threads that the step may hold.
    """
    try:
        results = list(op(items)) if items else []
        return tf.concat([head_of(""), pack(results, width)], axis=0)
    except Exception as error:  # Any exception: all ranks must receive it
        text = f"op failed on rank {rank}: {type(error).__name__}: {error}"
        return tf.concat([head_of(text), tf.zeros([width], tf.uint8)], axis=0)


def size_bytes(spec: tf.TensorSpec) -> int:
    """Return the bytes of a result."""
    return int(spec.shape.num_elements() * spec.dtype.size)


def head_of(text: str) -> tf.Tensor:
    """Return the head, uint8 [HEAD], of a share that failed with this text; "": that did not."""
    written = text.encode("ascii", "replace").replace(b"\0", b" ")[:HEAD]
    return tf.constant(np.frombuffer(written.ljust(HEAD, b"\0"), np.uint8))


def outcome_of(heads: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return True if any share of the heads, uint8 [shares, HEAD], failed, and the first's text."""
    failed = heads[:, 0] != 0
    first = tf.gather(heads, tf.argmax(tf.cast(failed, tf.int32)))
    letters = tf.cast(tf.boolean_mask(first, first != 0), tf.int32)
    return tf.reduce_any(failed), tf.strings.unicode_encode(letters, "UTF-8")


def pack(results: Sequence[tf.Tensor], width: int) -> tf.Tensor:
    """Return the bytes of some results one after another, padded to uint8 [width].

    **Cost:** few operations: neighbours of one dtype are joined first, those of one shape at once.
    """
    parts = []
    for dtype, run in itertools.groupby(
        map(tf.convert_to_tensor, results), lambda tensor: tensor.dtype
    ):
        group = list(run)
        alike = all(tensor.shape == group[0].shape for tensor in group)
        joined = (
            tf.reshape(tf.stack(group), [-1])
            if alike
            else tf.concat([tf.reshape(tensor, [-1]) for tensor in group], axis=0)
        )
        written = tf.cast(joined, tf.uint8) if dtype == tf.bool else tf.bitcast(joined, tf.uint8)
        parts.append(tf.reshape(written, [-1]))
    used = sum(part.shape[0] for part in parts)
    return tf.concat([*parts, tf.zeros([width - used], tf.uint8)], axis=0)


def unpack(row: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Return the results of these shapes and dtypes that `pack` made a row of."""
    results, start = [], 0
    for dtype, run in itertools.groupby(specs, lambda spec: spec.dtype):
        group = list(run)
        counts = [spec.shape.num_elements() for spec in group]
        end = start + sum(counts) * dtype.size
        joined, start = _from_bytes(row[start:end], dtype), end
        if all(spec.shape == group[0].shape for spec in group):
            results += tf.unstack(tf.reshape(joined, [len(group), *group[0].shape]))
        else:
            parts = tf.split(joined, counts)
            results += [
                tf.reshape(part, spec.shape) for part, spec in zip(parts, group, strict=True)
            ]
    return results


def _from_bytes(part: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.bool:
        return part != 0
    if dtype.size == 1:
        return tf.bitcast(part, dtype)
    return tf.bitcast(tf.reshape(part, [-1, dtype.size]), dtype)
