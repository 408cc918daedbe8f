"""Write entries for the wire, and read them: the codecs that routes use.

    Codec            lossless: sparse buckets, and dense ones in the dtype of their entries
    RoundingCodec    dense buckets in 16 bits; a residual keeps the rounding error
    CodesCodec       dense buckets in codes of 8 to 1 bits; a residual keeps the rounding error

`rounded` rounds the entries that a sparse bucket sends. `core.wire_formats` has the table.
"""

import tensorflow as tf

from tfcommx.core import Sparse
from tfcommx.core.wire_formats import CODE_BITS, SPARSE_FORMATS
from tfcommx.kernels import dense as dense_kernel
from tfcommx.kernels import low_bits as low_bits_kernel
from tfcommx.kernels import sparse as merge_kernel
from tfcommx.kernels import wire as wire_kernel
from tfcommx.kernels import wire_codes
from tfcommx.wire.formats import of_others, sum_dtype


def rounded(sparse: Sparse, wire: str) -> tuple[Sparse, tf.Tensor | None]:
    """Round values to numbers that the format can write; return them and the rounding error.

    The rounding error belongs in the residual at the same indices. Nothing is lost, because
    `value == rounded + error` holds exactly (except differences below 1e-38, which the processor
    may flush to zero). NaN and Inf are unchanged, or become NaN in codes, and have no error. A
    finite value beyond float16 is clipped, as `kernels.dense.write` does.

    Args:
        sparse: values float32 [k].
        wire: one of core.SPARSE_WIRES, or "module:MEMBER".

    Returns:
        The same indices with rounded values, float32 [k], and the error, float32 [k]; None if the
        format writes float32.
    """
    custom = of_others(wire)
    if custom is not None:
        written, remainder = custom.rounded(sparse.values)
        return Sparse(sparse.indices, written, sparse.size), remainder
    values, dtype = sparse.values, SPARSE_FORMATS[wire].values
    if dtype == "float32":
        return sparse, None
    if dtype in CODE_BITS:
        written, error = wire_codes.round_values(values, dtype)
        return Sparse(sparse.indices, written, sparse.size), error
    finite = tf.math.is_finite(values)
    written = tf.cast(dense_kernel.narrowed(values, dtype), tf.float32)
    # An entry that rounds to 0 is kept by its bits, because a subtraction may flush a denormal
    # number
    difference = tf.where(written == 0, values, values - written)
    error = tf.where(finite, difference, tf.zeros_like(values))
    return Sparse(sparse.indices, written, sparse.size), error


def encode(sparse: Sparse, wire: str) -> tf.Tensor:
    """Write k entries as int32 words.

    Args:
        sparse: indices int32 [k], ascending except for the pair formats; values float32 [k], as
            `rounded` returned them.
        wire: one of core.SPARSE_WIRES, or "module:MEMBER".

    Returns:
        int32 [words], `4 * words == formats.size_bytes(k, size, wire)`.

    **Cost:** one pass over the entries.
    """
    custom = of_others(wire)
    return wire_kernel.encode(sparse, wire) if custom is None else custom.encode(sparse)


def merge(
    buffers: tf.Tensor, k: int, size: int, wire: str, shards: int = 1, factor: float = 1.0
) -> tf.Tensor:
    """Add the entries of all gathered buffers into a dense vector, float32 [shards * size].

    Every rank gets the same bits, because the buffers are added in rank order.

    Args:
        buffers: int32 [shards * p * words], the buffers of p ranks one after another, for each
            shard in turn.
        k: entries in each buffer.
        size: length of the shard that the indices point into.
        shards: equal parts of the result, >= 1.
        factor: > 0, multiplies each entry before it is added.

    **Cost:** one write of the result, whatever the number of shards.
    """
    indices, values = decode(buffers, k, size, wire, shards)
    # Here the factor multiplies the received entries only; after the merge it would be a pass over
    # the vector, 2.4 ms for 8 million entries
    if factor != 1:
        values = values * tf.constant(factor, values.dtype)
    # The length must be known while tracing, because collectives count their bytes then
    return tf.ensure_shape(merge_kernel.merge(indices, values, shards * size, k), [shards * size])


def decode(
    buffers: tf.Tensor, k: int, size: int, wire: str, shards: int = 1
) -> tuple[tf.Tensor, tf.Tensor]:
    """Read the entries of all gathered buffers.

    Returns:
        indices int32 [entries] into the vector of all shards, and values float32 [entries].
    """
    custom = of_others(wire)
    if custom is None:
        return wire_kernel.decode(buffers, k, size, wire, shards)
    indices, values = custom.decode(tf.reshape(buffers, [-1, custom.words(k, size)]), k, size)
    by_shard = tf.reshape(indices, [shards, -1]) + size * tf.range(shards)[:, None]
    return tf.reshape(by_shard, [-1]), tf.reshape(values, [-1])


class Codec:
    """Writes entries without a rounding error that a residual would have to keep.

    Args:
        factor: > 0, multiplies the entries that `merge` adds.
    """

    encode = staticmethod(encode)

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def merge(self, buffers: tf.Tensor, k: int, size: int, wire: str, shards: int = 1) -> tf.Tensor:
        """Add the entries of all gathered buffers; see the function `merge`."""
        return merge(buffers, k, size, wire, shards, self.factor)

    def write_dense(
        self, entries: tf.Tensor, dtype: str, start: int, scale: float, reach: float
    ) -> tf.Tensor:
        """Write a dense vector: float16 as float16, float32 or float64."""
        return tf.cast(entries, dtype)

    def read_dense(self, written: tf.Tensor, dtype: str, into: tf.DType, scale: float) -> tf.Tensor:
        """Read the output of `write_dense`, into a dtype."""
        return tf.cast(written, into)

    def add_dense(self, written: tf.Tensor, dtype: str, parts: int, scale: float) -> tf.Tensor:
        """Add equal parts of the output of `write_dense`, in their order.

        Returns:
            float32 [n]; float64 if it travelled as float64.
        """
        total, *summands = [tf.cast(part, sum_dtype(dtype)) for part in tf.split(written, parts)]
        for summand in summands:
            total += summand
        return total

    def add_and_write_dense(
        self, written: tf.Tensor, dtype: str, parts: int, start: int, own: float, scale: float
    ) -> tf.Tensor:
        """Add equal parts of the output of `write_dense`, and write the sum.

        Args:
            written: the parts, one after another.
            dtype: of the parts and of the sum on the wire.
            parts: >= 1.
            start: position of the part in the vector that this rank wrote.
            own: scale with which the parts were written.
            scale: scale with which to write the sum.
        """
        total = self.add_dense(written, dtype, parts, own)
        return self.write_dense(total, dtype, start, scale, 1 / scale)


class RoundingCodec(Codec):
    """Writes a dense vector in 16 bits; a residual keeps the rounding error.

    Args:
        residual: of this rank: float32, as long as its part of the vector.
        factor: multiplies the result of `read_dense`.
    """

    def __init__(self, residual: tf.Variable, factor: float) -> None:
        super().__init__(factor)
        self._residual = residual

    def write_dense(
        self, entries: tf.Tensor, dtype: str, start: int, scale: float, reach: float
    ) -> tf.Tensor:
        """Write entries plus their residual, from `start` on, as `kernels.dense.write` does."""
        # bfloat16's bits as float16, because Horovod has no bfloat16 and NCCL no 16-bit integers
        return dense_kernel.write(entries, self._residual, dtype, start, scale, reach)

    def read_dense(self, written: tf.Tensor, dtype: str, into: tf.DType, scale: float) -> tf.Tensor:
        """Read a vector that was written with this scale, times the factor."""
        return tf.cast(dense_kernel.add(written, dtype, factor=self.factor / scale), into)

    def add_dense(self, written: tf.Tensor, dtype: str, parts: int, scale: float) -> tf.Tensor:
        """Add equal parts of a vector that was written with this scale, in float32 and in order."""
        return dense_kernel.add(written, dtype, parts, 1 / scale)


class CodesCodec(Codec):
    """Writes a dense vector in codes of 8 to 1 bits; a residual keeps the rounding error.

    Args:
        residual: of this rank: float32, as long as its part of the vector.
        entries: of a shard, which is written separately, >= 1.
        real: entries of this rank's part of the vector that are not padding.
        factor: multiplies the result of `read_dense`.
    """

    def __init__(self, residual: tf.Variable, entries: int, real: int, factor: float) -> None:
        super().__init__(factor)
        self._residual, self._entries, self._real = residual, entries, real

    def write_dense(
        self, entries: tf.Tensor, dtype: str, start: int, scale: float, reach: float
    ) -> tf.Tensor:
        """Write shards of entries plus their residual, as `kernels.low_bits.write` does."""
        # Without the scale, because the steps are bfloat16, which has the range of float32
        return low_bits_kernel.write(entries, self._residual, dtype, self._entries, self._real)

    def add_and_write_dense(
        self, written: tf.Tensor, dtype: str, parts: int, start: int, own: float, scale: float
    ) -> tf.Tensor:
        """Add a shard that several ranks wrote, and its residual; write the sum."""
        # Padding is at the end of the vector, so it begins at `real`, whatever the shard
        return low_bits_kernel.add_and_write(
            written, self._residual, dtype, self._entries, start, self._real - start
        )

    def read_dense(self, written: tf.Tensor, dtype: str, into: tf.DType, scale: float) -> tf.Tensor:
        """Read shards, times the factor."""
        return tf.cast(low_bits_kernel.read(written, dtype, self._entries, self.factor), into)
