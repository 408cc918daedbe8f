"""Values as codes of 8 or 4 bits, in blocks that share a step.

ops/kernels/wire_codes.h has the rule and its reasons. In plain TensorFlow, `pack` puts numbers of a
few bits into int32 words, beginning with the lowest bit.
"""

import numpy as np
import tensorflow as tf

from tfcommx.core.wire_formats import CODE_BITS, CODE_BLOCK, code_words
from tfcommx.kernels import loader, traced


def pack(numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Write the lowest bits of numbers one after another.

    >>> pack(tf.constant([1, 2, -1]), 4).numpy().tolist()
    [3873]

    Args:
        numbers: int32 [n].
        width: bits of each number, a divisor of 32.

    Returns:
        int32 [ceil(n * width / 32)]; the bits at the end are zero.

    **Ranks:** local.
    """
    count = 32 // width
    padded = tf.pad(numbers, [[0, -traced.length(numbers) % count]])
    low = tf.bitwise.bitwise_and(tf.reshape(padded, [-1, count]), _mask(width))
    # No two have a bit in common, and the sum is their union; it may be negative
    return tf.reduce_sum(tf.bitwise.left_shift(low, tf.range(0, 32, width)), axis=1)


def unpack(words: tf.Tensor, width: int) -> tf.Tensor:
    """Read the output of `pack`.

    >>> unpack(tf.constant([[3873]]), 4)[0, :4].numpy().tolist()
    [1, 2, 15, 0]

    Args:
        words: int32 [rows, n].
        width: bits of each number, a divisor of 32.

    Returns:
        int32 [rows, n * 32 / width], none negative unless `width` is 32.

    **Ranks:** local.
    """
    shifted = tf.bitwise.right_shift(words[:, :, None], tf.range(0, 32, width))
    low = tf.bitwise.bitwise_and(shifted, _mask(width))
    return tf.reshape(low, [tf.shape(words)[0], words.shape[1] * (32 // width)])


def _mask(width: int) -> int:
    return (1 << width) - 1 if width < 32 else -1


def round_values(values: tf.Tensor, dtype: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Round values to numbers that codes can represent.

    >>> written, errors = round_values(tf.constant([7.0, -3.25, 0.0]), "int4")
    >>> written.numpy().tolist(), errors.numpy().tolist()
    ([7.0, -3.0, 0.0], [0.0, -0.25, 0.0])

    A code times its block's step is the nearest multiple of the step. The step is the largest
    finite magnitude of 32 values, divided by 127 (int8) or 7 (int4), as bfloat16. Values that are
    not finite become NaN. If the step would be denormal, 0 is written.

    Args:
        values: float32 [k].
        dtype: one of CODE_BITS.

    Returns:
        The written values, float32 [k], and the rounding errors, float32 [k]. Their sum is exactly
        the values, unless the error is below 1e-38 (it may be flushed to zero) or a value is not
        finite (its error is 0). Rounding written values again does not change them.

    **Ranks:** local.
    **Cost:** one pass.
    """
    ops = loader.library()
    if ops is None:
        return round_definition(values, dtype)
    return tuple(ops.tfcommx_wire_round(values=values, type=dtype))


def round_definition(values: tf.Tensor, dtype: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Define `round_values` in plain TensorFlow."""
    steps, codes = _codes(values, dtype)
    written = _values(steps, codes, dtype)[: traced.length(values)]
    # Zero is not subtracted, because a device that flushes denormals would lose a denormal value
    difference = tf.where(written == 0, values, values - written)
    return written, tf.where(tf.math.is_finite(values), difference, tf.zeros_like(values))


def write_definition(values: tf.Tensor, dtype: str) -> tf.Tensor:
    """Define the writing of codes in plain TensorFlow: float32 [k] to int32 words."""
    k = traced.length(values)
    words = code_words(k, dtype)
    steps, codes = _codes(values, dtype)
    halves = tf.bitcast(tf.cast(steps[:, 0], tf.bfloat16), tf.int16)
    halves = tf.bitcast(tf.pad(halves, [[0, 2 * words[0] - traced.length(halves)]]), tf.uint16)
    width = CODE_BITS[dtype]
    flat = pack(tf.reshape(codes, [-1]), width)[: words[1]]
    return tf.concat([pack(tf.cast(halves, tf.int32), 16), flat], axis=0)


def read_definition(words: tf.Tensor, k: int, dtype: str) -> tf.Tensor:
    """Define the reading of codes in plain TensorFlow: int32 words to float32 [buffers, k].

    Args:
        words: int32 [buffers, sum(code_words(k, dtype))].
        k: values in each buffer.
        dtype: one of CODE_BITS.
    """
    head, tail = tf.split(words, code_words(k, dtype), axis=1)
    width, blocks = CODE_BITS[dtype], -(-k // CODE_BLOCK)
    steps = tf.bitcast(tf.bitwise.left_shift(unpack(head, 16), 16), tf.float32)[:, :blocks]
    codes = unpack(tail, width)
    # Shifted left and back, which extends the sign of a code
    signed = tf.bitwise.right_shift(tf.bitwise.left_shift(codes, 32 - width), 32 - width)
    padded = tf.pad(signed, [[0, 0], [0, blocks * CODE_BLOCK - signed.shape[1]]])
    parts = tf.reshape(padded, [-1, CODE_BLOCK])
    return tf.reshape(_values(tf.reshape(steps, [-1, 1]), parts, dtype), [-1, blocks * CODE_BLOCK])[
        :, :k
    ]


def _codes(values: tf.Tensor, dtype: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the step of each block, float32 [blocks, 1], and codes, int32 [blocks, 32]."""
    largest = _largest(dtype)
    parts = tf.reshape(tf.pad(values, [[0, -traced.length(values) % CODE_BLOCK]]), [-1, CODE_BLOCK])
    finite = tf.math.is_finite(parts)
    clean = tf.where(finite, parts, tf.zeros_like(parts))
    most = tf.reduce_max(tf.abs(clean), axis=1, keepdims=True)
    nearest = tf.cast(tf.cast(most / largest, tf.bfloat16), tf.float32)
    nearest = tf.minimum(nearest, largest_step(largest))
    steps = tf.where(most < largest * 2.0**-126, tf.zeros_like(most), nearest)
    # The step is rounded, perhaps down, so the largest value may lie beyond the last code
    codes = tf.clip_by_value(tf.math.divide_no_nan(clean, steps), -largest, largest)
    # The lowest code, which stands for no multiple, is NaN
    return steps, tf.where(finite, tf.cast(tf.round(codes), tf.int32), -int(largest) - 1)


def largest_step(multiple: float) -> float:
    """Return the largest step, with the bits of a bfloat16, of which this multiple is finite."""
    bits = np.float32(np.finfo(np.float32).max / np.float32(multiple)).view(np.uint32)
    # Rounded down, because the nearest bfloat16 may be larger, and its multiple Inf
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


def _values(steps: tf.Tensor, codes: tf.Tensor, dtype: str) -> tf.Tensor:
    """Return float32 [32 * blocks]."""
    numbers = tf.cast(codes, tf.float32) * steps
    written = tf.where(codes < -int(_largest(dtype)), float("nan"), numbers)
    return tf.reshape(written, [-1])


def _largest(dtype: str) -> float:
    return float(2 ** (CODE_BITS[dtype] - 1) - 1)
