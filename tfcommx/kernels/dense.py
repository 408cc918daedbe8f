"""Dense: a vector in 16 bits, with its rounding errors in a residual; and sums of several.

ops/kernels/dense.h has the semantics.
"""

import tensorflow as tf

from tfcommx.kernels import loader

FLOAT16_LARGEST = 65504.0


def write(
    gradient: tf.Tensor,
    residual: tf.Variable,
    dtype: str,
    start: int = 0,
    scale: float = 1.0,
    reach: float = 1.0,
) -> tf.Tensor:
    """Write gradient + residual in 16 bits; the residual keeps the rounding error.

    >>> residual = tf.Variable([2.0**-12, 0.0])
    >>> written = write(tf.constant([1.0, 1e5]), residual, "float16")
    >>> written.numpy().tolist(), residual.numpy().tolist()
    ([1.0, 65504.0], [0.000244140625, 34496.0])

    If the sum is NaN or infinite, it is written and the residual is unchanged. A finite number that
    float16 cannot hold is clipped to the largest, 65504 times `reach`; from 2**29 up to 2**15, and
    from 2**39 up to 0 (both times `reach`), because float32 cannot hold its exact difference to a
    larger number. Differences below 1e-38 are zero.

    Args:
        gradient: float32 [n].
        residual: a float32 variable, whose entries [start, start + n) are updated in place.
        dtype: float16 or bfloat16.
        start: position of the first entry in the residual, >= 0.
        scale: a power of two in (0, 1]; entries times the scale are rounded and written.
        reach: a power of two >= 1, for float16 <= 1 / scale; multiplies the limits of float16.

    Returns:
        float16 [n]; for bfloat16, its bits.

    **Ranks:** local. **Cost:** one pass, 14 bytes per entry.
    **Raises:** InvalidArgumentError if the residual is too short or not float32, or the scale or
    the reach is no such power of two.
    """
    ops = loader.library()
    if ops is None:
        return write_definition(gradient, residual, dtype, start, scale, reach)
    return ops.tfcommx_dense_write(
        gradient=gradient,
        residual=residual.handle,
        type=dtype,
        start=start,
        scale=scale,
        reach=reach,
    )


def add(written: tf.Tensor, dtype: str, parts: int = 1, factor: float = 1.0) -> tf.Tensor:
    """Add equal parts of the output of `write`, in their order, as float32 [n].

    >>> add(tf.constant([1.0, 2.0, 3.0, 4.0], tf.float16), "float16", 2, 0.5).numpy().tolist()
    [2.0, 3.0]

    Args:
        written: float16 [parts * n], the output of `write`.
        dtype: float16 or bfloat16.
        parts: number of parts, >= 1.
        factor: multiplies the sums.

    **Ranks:** local. **Cost:** one pass.
    **Raises:** InvalidArgumentError if the parts are not equal.
    """
    ops = loader.library()
    if ops is None:
        return add_definition(written, dtype, parts, factor)
    return ops.tfcommx_dense_add(written=written, type=dtype, parts=parts, factor=factor)


def write_definition(
    gradient: tf.Tensor,
    residual: tf.Variable,
    dtype: str,
    start: int = 0,
    scale: float = 1.0,
    reach: float = 1.0,
) -> tf.Tensor:
    """Define `write` in plain TensorFlow."""
    old, stop = residual.read_value(), start + gradient.shape[0]
    total = gradient + old[start:stop]
    written = narrowed(total, dtype, scale, reach)
    # Exact in float32 by the limits of `narrowed`, and because the scale is a power of two
    error = total - tf.cast(written, tf.float32) / scale
    # A NaN or Inf is sent once; from the residual it would return in every step
    remainder = tf.where(tf.math.is_finite(total), error, old[start:stop])
    residual.assign(tf.concat([old[:start], remainder, old[stop:]], axis=0))
    return written if dtype == "float16" else tf.bitcast(written, tf.float16)


def narrowed(numbers: tf.Tensor, dtype: str, scale: float = 1.0, reach: float = 1.0) -> tf.Tensor:
    """Return float32 numbers in 16 bits, as `write` does: the nearest ones, clipped to reach."""
    finite, size = tf.math.is_finite(numbers), tf.abs(numbers)
    if dtype == "float16":
        far = tf.where(size < 2.0**39 * reach, 2.0**15 * reach, 0.0)
        largest = tf.where(size < 2.0**29 * reach, FLOAT16_LARGEST * reach, far)
    else:
        # bfloat16 has the range of float32, so only numbers that would round up to Inf are clipped
        largest = tf.cast(tf.bfloat16.max, tf.float32)
    cut = tf.minimum(size, largest) * tf.sign(numbers) * scale
    return tf.cast(tf.where(finite, cut, numbers), dtype)


def add_definition(
    written: tf.Tensor, dtype: str, parts: int = 1, factor: float = 1.0
) -> tf.Tensor:
    """Define `add` in plain TensorFlow."""
    numbers = written if dtype == "float16" else tf.bitcast(written, tf.bfloat16)
    # In float32 and in the order of the ranks, because every rank must get the same bits
    total, *summands = [tf.cast(part, tf.float32) for part in tf.split(numbers, parts)]
    for summand in summands:
        total += summand
    return total * factor
