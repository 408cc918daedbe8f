"""How selected entries are written: a Sparse as one flat buffer of exact size, and back. One
buffer, so one collective.

    pair32          k int32 indices, k float32 values
    8 B per entry pair16/DTYPE    k int32 indices, k 16-bit values
    6 B block16/DTYPE   one int32 count per block of 65,536 entries of the vector, k uint16 offsets
                    into their blocks, k values
                    4 B, or 6 B with float32

Buffers are int32 words, which every engine carries (NCCL knows no 16-bit integers); 16-bit parts of
odd length end in two zero bytes. The size depends on k and the vector's length only, so that
Horovod's cache of all-gathers holds.
"""

from __future__ import annotations

import tensorflow as tf

from tfcommx.kernels import merge as merge_kernel
from tfcommx.kernels import wire as wire_kernel
from tfcommx.terms import Sparse
from tfcommx.terms.wire_formats import value_dtype, wire_words

FLOAT16_LARGEST = 65504.0


def size_bytes(k: int, size: int, wire: str) -> int:
    """Return the bytes of k entries of a vector of `size` entries."""
    return 4 * sum(wire_words(k, size, wire))


def rounded(sparse: Sparse, wire: str) -> tuple[Sparse, tf.Tensor | None]:
    """Round values to what the format can write; return them with what is left: float32[k], None
    where nothing can be.

    What is left belongs into the residual at the same indices: `value == rounded + left` holds
    exactly, so nothing is lost (but for differences below 1e-38, which the processor may flush to
    zero). NaN and Inf stay as they are and leave nothing. A finite value beyond float16 is cut to
    its largest, 65504; from 2**29 on to 2**15, and from 2**39 on to 0, since float32 cannot hold
    the difference to more.

    Args:
        sparse: values float32[k].
        wire: one of terms.SPARSE_WIRES.
    """
    values, dtype = sparse.values, tf.as_dtype(value_dtype(wire))
    if dtype == tf.float32:
        return sparse, None
    finite = tf.math.is_finite(values)
    size = tf.abs(values)
    if dtype == tf.float16:
        largest = tf.where(size < 2.0**29, FLOAT16_LARGEST, tf.where(size < 2.0**39, 2.0**15, 0.0))
    else:
        largest = tf.cast(tf.bfloat16.max, tf.float32)
    cut = tf.where(finite, tf.minimum(size, largest) * tf.sign(values), values)
    written = tf.cast(tf.cast(cut, dtype), tf.float32)
    left = tf.where(finite, tf.where(written == 0, values, values - written), tf.zeros_like(values))
    return Sparse(sparse.indices, written, sparse.size), left


def encode(sparse: Sparse, wire: str) -> tf.Tensor:
    """Write k entries as int32 words. **Cost:** one pass over the entries.

    Args:
        sparse: indices int32[k], ascending for block16; values float32[k], as `rounded` returned
            them.
        wire: one of terms.SPARSE_WIRES.
    """
    return wire_kernel.encode(sparse, wire)


def merge(buffers: tf.Tensor, k: int, size: int, wire: str, shards: int = 1) -> tf.Tensor:
    """Add the entries of all gathered buffers into a dense vector, in rank order, so that every
    rank gets the same bits.

    Args:
        buffers: int32[shards * p * words], the buffers of p ranks one after another, for each shard
            in turn.
        k: entries in each buffer.
        size: length of the shard that the indices point into.
        wire: the format in which they were encoded.
        shards: equal parts of the result, >= 1.

    Returns: float32[shards * size]. **Cost:** one write of the result, whatever the number of
    shards.
    """
    indices, values = wire_kernel.decode(buffers, k, size, wire, shards)
    return tf.ensure_shape(merge_kernel.merge(indices, values, shards * size, k), [shards * size])
