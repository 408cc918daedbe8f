"""Dense: a vector in codes of 8, 4, 2 or 1 bits, with its rounding errors in a residual.

ops/kernels/low_bits.h has the semantics, and explains the choice of the steps.
"""

import numpy as np
import tensorflow as tf

from tfcommx.core.wire_formats import DENSE_CODE_BLOCKS, DENSE_CODES, dense_code_words
from tfcommx.kernels import loader
from tfcommx.kernels.wire_codes import largest_step, pack, unpack

# Largest multiple of a step that a code represents
LARGEST = {"int8": 127, "int4": 7, "int2": 3, "int1": 1}


def write(
    gradient: tf.Tensor, residual: tf.Variable, wire: str, entries: int, real: int
) -> tf.Tensor:
    """Write gradient + residual as codes, shard by shard; the residual keeps the rounding error.

    >>> residual = tf.Variable([0.5, 0.0, 0.0, 0.0])
    >>> words = write(tf.constant([0.5, -2.0, 4.0, 0.0]), residual, "int1", entries=2, real=4)
    >>> read(words, "int1", entries=2).numpy().tolist(), residual.numpy().tolist()
    ([1.5, -1.5, 2.0, 2.0], [-0.5, -0.5, 2.0, -2.0])

    A block with a NaN or Inf is written as NaN, and its residuals are unchanged. Differences below
    1e-38 are zero.

    Args:
        gradient: float32 [shards * entries].
        residual: a float32 variable with as many entries, updated in place.
        wire: one of DENSE_CODES.
        entries: entries of a shard, >= 1. Each shard has separate blocks.
        real: entries of the gradient that are not padding, >= 0. Padding has no residual.

    Returns:
        int32 [shards * sum(dense_code_words(entries, wire))].

    **Ranks:** local. **Cost:** one pass.
    **Raises:** InvalidArgumentError if the gradient is not a whole number of shards, or the
    residual has another length or dtype.
    """
    ops = loader.library()
    if ops is None:
        return write_definition(gradient, residual, wire, entries, real)
    return ops.tfcommx_low_bits_write(
        gradient=gradient, residual=residual.handle, type=wire, entries=entries, real=real
    )


def add_and_write(
    words: tf.Tensor, residual: tf.Variable, wire: str, entries: int, start: int, real: int
) -> tf.Tensor:
    """Add a shard that several ranks wrote, and its residual; write the sum as codes.

    Ranks are added in their order and in float32, and the residual last. The residual then keeps
    the rounding error.

    >>> shards = [write(tf.constant([x]), tf.Variable([0.0]), "int1", 1, 1) for x in (1.0, 2.0)]
    >>> residual = tf.Variable([0.0, 5.0])
    >>> total = add_and_write(tf.concat(shards, 0), residual, "int1", entries=1, start=1, real=1)
    >>> read(total, "int1", entries=1).numpy().tolist()
    [8.0]

    Args:
        words: int32 [ranks * sum(dense_code_words(entries, wire))].
        residual: a float32 variable, whose entries [start, start + entries) are updated in place.
        wire: one of DENSE_CODES.
        entries: entries of the shard, >= 1.
        start: position of the shard in the residual, >= 0.
        real: entries of the shard that are not padding, <= entries; less than 0 counts as 0.

    Returns:
        int32 [sum(dense_code_words(entries, wire))].

    **Ranks:** local. **Cost:** one pass.
    **Raises:** InvalidArgumentError if the words are not a whole number of shards, or the residual
    is too short or not float32.
    """
    ops = loader.library()
    if ops is None:
        return add_and_write_definition(words, residual, wire, entries, start, real)
    return ops.tfcommx_low_bits_add(
        words=words, residual=residual.handle, type=wire, entries=entries, start=start, real=real
    )


def read(words: tf.Tensor, wire: str, entries: int, factor: float = 1.0) -> tf.Tensor:
    """Read shards that `write` or `add_and_write` wrote.

    Args:
        words: int32 [shards * sum(dense_code_words(entries, wire))].
        wire: one of DENSE_CODES.
        entries: entries of a shard, >= 1.
        factor: multiplies the result.

    Returns:
        float32 [shards * entries]. Padding is arbitrary.

    **Ranks:** local. **Cost:** one pass.
    **Raises:** InvalidArgumentError if the words are not a whole number of shards.
    """
    ops = loader.library()
    if ops is None:
        return read_definition(words, wire, entries, factor)
    return ops.tfcommx_low_bits_read(words=words, type=wire, entries=entries, factor=factor)


def write_definition(
    gradient: tf.Tensor, residual: tf.Variable, wire: str, entries: int, real: int
) -> tf.Tensor:
    """Define `write` in plain TensorFlow."""
    old = residual.read_value()
    words, remainder = _encode(gradient + old, old, wire, entries, real)
    residual.assign(remainder)
    return words


def add_and_write_definition(
    words: tf.Tensor, residual: tf.Variable, wire: str, entries: int, start: int, real: int
) -> tf.Tensor:
    """Define `add_and_write` in plain TensorFlow."""
    # Added in the order of the ranks, because the last bits of a float32 sum depend on the order
    total, *summands = tf.unstack(tf.reshape(read_definition(words, wire, entries), [-1, entries]))
    old, stop = residual.read_value(), start + entries
    for part in (*summands, old[start:stop]):
        total += part
    written, remainder = _encode(total, old[start:stop], wire, entries, real)
    residual.assign(tf.concat([old[:start], remainder, old[stop:]], axis=0))
    return written


def read_definition(words: tf.Tensor, wire: str, entries: int, factor: float = 1.0) -> tf.Tensor:
    """Define `read` in plain TensorFlow."""
    bits, block = DENSE_CODES[wire], DENSE_CODE_BLOCKS[wire]
    counts, blocks = dense_code_words(entries, wire), -(-entries // block)
    head, tail = tf.split(tf.reshape(words, [-1, sum(counts)]), counts, axis=1)
    steps = tf.bitcast(tf.bitwise.left_shift(unpack(head, 16), 16), tf.float32)[:, :blocks, None]
    by_word = tf.reshape(unpack(tail, bits), [-1, blocks, block * bits // 32, 32 // bits])
    codes = tf.reshape(tf.transpose(by_word, [0, 1, 3, 2]), [-1, blocks, block])
    values = _values(codes, steps, wire) * factor
    values = tf.where(tf.math.is_nan(steps), float("nan"), values)
    return tf.reshape(tf.reshape(values, [-1, blocks * block])[:, :entries], [-1])


def _encode(
    total: tf.Tensor, old: tf.Tensor, wire: str, entries: int, real: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the words of shards, and their residual, which was `old`."""
    size, block = total.shape[0], DENSE_CODE_BLOCKS[wire]
    blocks = -(-entries // block)
    shape = [size // entries, blocks, block]
    padding = [[0, 0], [0, blocks * block - entries]]

    def cut(vector: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.pad(tf.reshape(vector, [-1, entries]), padding), shape)

    present = cut(tf.constant(np.arange(size) < real))
    # Padding counts as 0, so that it affects the step of no block
    values = tf.where(present, cut(total), 0.0)
    finite = tf.reduce_all(tf.math.is_finite(values), axis=2, keepdims=True)
    clean = tf.where(finite, values, 0.0)
    steps = _steps(clean, tf.reduce_sum(tf.cast(present, tf.float32), axis=2, keepdims=True), wire)
    codes = tf.where(finite & present, _codes(clean, steps, wire), 0)
    remainder = tf.where(finite & present, values - _values(codes, steps, wire), cut(old))
    remainder = tf.reshape(remainder, [-1, blocks * block])[:, :entries]
    # A block shares its step, so all ranks receive the whole block as NaN
    steps = tf.where(finite, steps, float("nan"))
    return _packed(steps, codes, wire, entries), tf.reshape(remainder, [-1])


def _packed(steps: tf.Tensor, codes: tf.Tensor, wire: str, entries: int) -> tf.Tensor:
    """Return the words of shards: steps [shards, blocks, 1], codes [shards, blocks, block]."""
    bits, of_steps = DENSE_CODES[wire], dense_code_words(entries, wire)[0]
    halves = tf.bitwise.right_shift(tf.bitcast(steps[:, :, 0], tf.int32), 16)
    halves = tf.pad(halves, [[0, 0], [0, 2 * of_steps - steps.shape[1]]])
    head = tf.reshape(pack(tf.reshape(halves, [-1]), 16), [-1, of_steps])
    # The distance of the codes of a word, in entries, is the number of words of a block
    distance = DENSE_CODE_BLOCKS[wire] * bits // 32
    by_word = tf.transpose(tf.reshape(codes, [-1, 32 // bits, distance]), [0, 2, 1])
    packed = tf.reshape(pack(tf.reshape(by_word, [-1]), bits), [codes.shape[0], -1])
    return tf.reshape(tf.concat([head, packed], axis=1), [-1])


def _steps(values: tf.Tensor, counts: tf.Tensor, wire: str) -> tf.Tensor:
    """Return the step of each block, float32 [shards, blocks, 1], with the bits of a bfloat16."""
    largest = LARGEST[wire]
    if wire in ("int8", "int4"):
        # The largest magnitude gets the last code, so no entry is clipped
        size = tf.reduce_max(tf.abs(values), axis=2, keepdims=True)
        step = size / largest
    else:
        # Divided before the sum, which could overflow; by halves, as GPUs add
        block = DENSE_CODE_BLOCKS[wire]
        terms = tf.abs(values) * (1 / block)
        while terms.shape[2] > 1:
            half = terms.shape[2] // 2
            terms = terms[:, :, :half] + terms[:, :, half:]
        # The mean of the entries that are not padding; a block of padding alone has none
        size = terms * tf.math.divide_no_nan(float(block), counts)
        # For normal numbers four equidistant levels err least at .624 of the mean magnitude (Max,
        # 1960)
        step = size * (0.625 if wire == "int2" else 1.0)
    nearest = tf.cast(tf.cast(step, tf.bfloat16), tf.float32)
    return tf.where(size < 2.0**-100, 0.0, tf.minimum(nearest, largest_step(largest)))


def _codes(values: tf.Tensor, steps: tf.Tensor, wire: str) -> tf.Tensor:
    if wire in ("int8", "int4"):
        return tf.cast(tf.round(values * tf.math.divide_no_nan(1.0, steps)), tf.int32)
    # The bit of the sign is read, as in the kernels, because -0.0 < 0 is False
    negative = tf.cast(tf.bitcast(values, tf.int32) < 0, tf.int32)
    if wire == "int1":
        return negative
    # Two steps are in the middle between the levels of one and three
    return negative + 2 * tf.cast((tf.abs(values) >= 2 * steps) & (steps > 0), tf.int32)


def _values(codes: tf.Tensor, steps: tf.Tensor, wire: str) -> tf.Tensor:
    if wire in ("int8", "int4"):
        spare = 32 - DENSE_CODES[wire]  # Shifted left and back, which extends the sign
        numbers = tf.bitwise.right_shift(tf.bitwise.left_shift(codes, spare), spare)
    else:
        numbers = (1 + tf.bitwise.bitwise_and(codes, 2)) * (
            1 - 2 * tf.bitwise.bitwise_and(codes, 1)
        )
    return tf.cast(numbers, tf.float32) * steps
