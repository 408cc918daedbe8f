"""Wire: selected entries to one buffer of int32 words, and back.

`core.wire_formats` has the formats and counts the words, ops/kernels/wire.h has their layout, and
ops/kernels/wire_elias.h has the Elias-Fano coding of ascending indices, with its source.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfcommx.core import Sparse
from tfcommx.core.wire_formats import (
    BLOCK,
    CODE_BITS,
    SPARSE_FORMATS,
    bitmap_bits,
    low_bits,
    wire_words,
)
from tfcommx.kernels import loader, traced, wire_codes


def elias_encode_definition(indices: tf.Tensor, size: int) -> tf.Tensor:
    """Write int32 [k], ascending in [0, size), as int32 words: the bitmap, then the low bits."""
    k = traced.length(indices)
    width, length = low_bits(k, size), bitmap_bits(k, size)
    # High bits may repeat; their position in the list is added, so that each index sets a bit alone
    positions = tf.cast(tf.bitwise.right_shift(indices, width), tf.int64) + tf.range(
        k, dtype=tf.int64
    )
    bitmap = tf.scatter_nd(positions[:, None], tf.ones([k], tf.int32), [length])
    low = tf.bitwise.right_shift(indices[:, None], tf.range(width))
    return tf.concat(
        [wire_codes.pack(bitmap, 1), wire_codes.pack(tf.reshape(low, [-1]), 1)], axis=0
    )


def elias_decode_definition(bitmap: tf.Tensor, lows: tf.Tensor, k: int, size: int) -> tf.Tensor:
    """Read the k indices of each buffer, int32 [buffers, k]; see `IndexDefinition`."""
    width = low_bits(k, size)
    rows = tf.shape(bitmap)[0]
    # `where` lists the bits row by row, and each row has k of them
    positions = tf.reshape(tf.where(wire_codes.unpack(bitmap, 1) > 0)[:, 1], [rows, k])
    highs = tf.cast(positions - tf.range(k, dtype=tf.int64), tf.int32)
    bits = tf.reshape(wire_codes.unpack(lows, 1)[:, : k * width], [rows, k, width])
    low = tf.reduce_sum(tf.bitwise.left_shift(bits, tf.range(width)), axis=2)
    return tf.bitwise.left_shift(highs, width) + low


def encode(sparse: Sparse, wire: str) -> tf.Tensor:
    """Write k entries as one buffer, int32 [words].

    >>> chosen = Sparse(tf.constant([1, 4]), tf.constant([-5.0, 3.0]), 6)
    >>> encode(chosen, "block16/float16").numpy().size
    3

    Args:
        sparse: indices int32 [k] in [0, size), ascending except for the pair formats; values
            float32 [k], rounded to nearest even if the format is narrower; size, an int.
        wire: one of `core.SPARSE_WIRES`.

    **Ranks:** local.
    **Cost:** one pass.
    **Raises:** InvalidArgumentError if an index is out of range or order.
    """
    ops = loader.library()
    if ops is None:
        return encode_definition(sparse, wire)
    return ops.tfcommx_wire_encode(
        indices=sparse.indices, values=sparse.values, size=sparse.size, format=wire
    )


def decode(
    words: Any, k: int, size: int, wire: str, shards: int = 1
) -> tuple[tf.Tensor, tf.Tensor]:
    """Read the entries of p buffers, one after another.

    >>> chosen = Sparse(tf.constant([1, 4]), tf.constant([-5.0, 3.0]), 6)
    >>> indices, values = decode(encode(chosen, "pair32"), k=2, size=6, wire="pair32")
    >>> indices.numpy().tolist(), values.numpy().tolist()
    ([1, 4], [-5.0, 3.0])

    Args:
        words: int32 [p * words], the buffers of p ranks, with the same k, size and wire.
        k: entries in each buffer.
        size: length of the vector, or of each shard, that the indices point into.
        wire: one of `core.SPARSE_WIRES`.
        shards: equal parts of a vector of shards * size < 2^31 entries, a divisor of p; each part
            has p / shards buffers, in turn.

    Returns:
        indices int32 [p * k] into that vector and values float32 [p * k], in the order of the
        buffers.

    **Ranks:** local.
    **Cost:** one pass, with the buffers in parallel.
    **Raises:** InvalidArgumentError if the length, a buffer's counts or its indices do not fit k
    and size, or indices that must ascend do not; a GPU returns indices of -1 or as they are.
    """
    ops = loader.library()
    if ops is None:
        return decode_definition(words, k, size, wire, shards)
    return tuple(ops.tfcommx_wire_decode(words=words, k=k, size=size, shards=shards, format=wire))


def encode_definition(sparse: Sparse, wire: str) -> tf.Tensor:
    """Define `encode` in plain TensorFlow."""
    indices, dtype = SPARSE_FORMATS[wire]
    if dtype in CODE_BITS:
        values = wire_codes.write_definition(sparse.values, dtype)
    else:
        values = _to_words(tf.cast(sparse.values, dtype))
    written = INDEX_DEFINITIONS[indices].encode(sparse.indices, sparse.size)
    return tf.concat([written, values], axis=0)


def decode_definition(
    words: tf.Tensor, k: int, size: int, wire: str, shards: int = 1
) -> tuple[tf.Tensor, tf.Tensor]:
    """Define `decode` in plain TensorFlow."""
    parts = wire_words(k, size, wire)
    counts, written, last = tf.split(tf.reshape(words, [-1, sum(parts)]), parts, axis=1)
    form, dtype = SPARSE_FORMATS[wire]
    if dtype in CODE_BITS:
        values = wire_codes.read_definition(last, k, dtype)
    else:
        values = tf.cast(_from_words(last, k, tf.as_dtype(dtype)), tf.float32)
    indices = INDEX_DEFINITIONS[form].decode(counts, written, k, size)
    by_shard = tf.reshape(indices, [shards, -1]) + size * tf.range(shards)[:, None]
    return tf.reshape(by_shard, [-1]), tf.reshape(values, [-1])


def _block_encode(indices: tf.Tensor, size: int) -> tf.Tensor:
    last = _block_starts(size) + (BLOCK - 1)
    # Indices ascend, so the entries of a block are those between two ends
    ends = tf.searchsorted(indices, last, side="right", out_type=tf.int32)
    counts = ends - tf.concat([[0], ends[:-1]], axis=0)
    offsets = tf.cast(tf.bitwise.bitwise_and(indices, BLOCK - 1), tf.uint16)
    return tf.concat([counts, _to_words(offsets)], axis=0)


def _block_decode(counts: tf.Tensor, offsets: tf.Tensor, k: int, size: int) -> tf.Tensor:
    starts = tf.tile(_block_starts(size), [tf.shape(counts)[0]])
    read = tf.reshape(tf.cast(_from_words(offsets, k, tf.uint16), tf.int32), [-1])
    return tf.repeat(starts, tf.reshape(counts, [-1])) + read


class IndexDefinition(NamedTuple):
    """Definition of the writing and reading of indices, in plain TensorFlow."""

    # (int32 [k], size) -> int32 words, in the two parts that `core.wire_formats` counts
    encode: Callable[[tf.Tensor, int], tf.Tensor]
    # (first part, second part, each int32 [buffers, words], k, size) -> int32 of buffers * k
    decode: Callable[[tf.Tensor, tf.Tensor, int, int], tf.Tensor]


INDEX_DEFINITIONS = {
    "pair": IndexDefinition(
        lambda indices, size: indices, lambda nothing, indices, k, size: indices
    ),
    "block16": IndexDefinition(_block_encode, _block_decode),
    "elias": IndexDefinition(elias_encode_definition, elias_decode_definition),
}


def _block_starts(size: int) -> tf.Tensor:
    return tf.range(0, size, BLOCK, dtype=tf.int32)


def _to_words(entries: tf.Tensor) -> tf.Tensor:
    if entries.dtype.size == 4:
        return tf.bitcast(entries, tf.int32)
    # A word holds two halves, so an odd number of them is padded
    padding = [[0, traced.length(entries) % 2]]
    halves = tf.pad(tf.bitcast(entries, tf.int16), padding)
    return tf.bitcast(tf.reshape(halves, [-1, 2]), tf.int32)


def _from_words(words: tf.Tensor, k: int, dtype: tf.DType) -> tf.Tensor:
    if dtype.size == 4:
        return tf.bitcast(words, dtype)
    halves = tf.reshape(tf.bitcast(words, tf.int16), [-1, 2 * words.shape[1]])
    return tf.bitcast(halves[:, :k], dtype)
