"""Every kernel in plain TensorFlow: the readable specification, and what works where there is no
native library.

Magnitudes are compared as the bits of |x|, taken as an integer: for finite floats the order is the
same, and no denormal is lost in the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcommx.terms import Sparse

# a band of mstopk: keys that agree above this bit, so equal exponent and first twelve mantissa bits
BAND_SHIFT = 11
BANDS = 2 ** (31 - BAND_SHIFT)
NOT_FINITE = 0x7F800000  # keys of infinities and NaNs start here


def keys(x: tf.Tensor) -> tf.Tensor:
    """Return the bits of |x| as int32 [n], for float32 [n]: ordered as the magnitudes are."""
    return tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7FFFFFFF)


def magnitude(x: tf.Tensor) -> tf.Tensor:
    """Return |x|, with infinity for NaN, as float32 [n]: for rules made of TensorFlow's ops, which
    on a GPU would send int32 to the host.

    Denormals may all count as zero in comparisons.
    """
    return tf.where(tf.math.is_finite(x), tf.abs(x), float("inf"))


def splitmix64(seed: Any) -> tf.Tensor:
    """Hash an int64 to a uint64. **Source:** Steele, Lea, Flood, Fast Splittable Pseudorandom
    Number Generators, 2014.
    """

    def shifted(z: tf.Tensor, bits: int) -> tf.Tensor:
        return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, tf.constant(bits, tf.uint64)))

    z = tf.bitcast(tf.cast(seed, tf.int64), tf.uint64) + tf.constant(0x9E3779B97F4A7C15, tf.uint64)
    z = shifted(z, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    z = shifted(z, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return shifted(z, 31)


def below(seed: Any, count: tf.Tensor) -> tf.Tensor:
    """Return the seed's number in [0, count), int32: each equally likely, up to 2^-32. 1 <= count <
    2^31.
    """
    number = tf.bitcast(
        tf.bitwise.right_shift(splitmix64(seed), tf.constant(1, tf.uint64)), tf.int64
    )
    return tf.cast(tf.math.floormod(number, tf.cast(count, tf.int64)), tf.int32)


def select(gradient: tf.Tensor, k: int, seed: int, rule: str) -> Sparse:
    """Choose k entries of a gradient by magnitude; the specification of `native.select`.

    **Cost:** a dozen passes; `exact` sorts on one thread.
    **Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters, 2021, Algorithm 1, with thresholds at the edges of bins in place of its binary search.
    """
    acc = tf.cast(gradient, tf.float32)
    indices = choose(acc, k, seed, rule)
    return Sparse(indices, tf.gather(acc, indices), _size(gradient))


def select_with_residual(
    gradient: tf.Tensor,
    residual: tf.Variable,
    k: int,
    seed: int,
    rule: str,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Choose k entries of gradient + residual, keep the rest; the specification of
    `native.select_with_residual`.
    """
    return error_feedback(
        lambda acc: select(acc, k, seed, rule), gradient, residual, velocity, momentum
    )


def error_feedback(
    choose_from: Callable[[tf.Tensor], Sparse],
    gradient: tf.Tensor,
    residual: tf.Variable,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Let any choice be made from gradient + residual, and keep in the residual what was not
    chosen.

    With a velocity u, from the accumulated velocity in place of the accumulated gradient, so that
    delayed entries keep their
    momentum:

        u = momentum u + g;   acc = r + u;   the chosen entries of acc travel, and u and r are
        zeroed there (factor masking)

    Args: choose_from: float32 [n] -> Sparse; gradient: float [n]; residual, velocity: float32 [n]
    variables, updated in place; momentum in [0, 1). A NaN or infinite sum leaves the entries of
    both as they were, chosen or not.
    Returns: what was chosen. **Cost:** some five passes besides the choice, four more with a
    velocity.
    **Source:** Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Stich et al., Sparsified SGD
    with Memory, 2018; Lin et al., Deep Gradient Compression, 2018, section 3.2 and Algorithm 4, for
    the velocity.
    """
    old = tf.convert_to_tensor(residual)
    moved = tf.cast(gradient, tf.float32)
    if velocity is not None:
        moved = tf.constant(momentum, tf.float32) * velocity + moved
    acc = moved + old
    chosen = choose_from(acc)
    # nothing large in int32: TensorFlow's ops take it from a GPU to the host
    places = tf.cast(chosen.indices, tf.int64)[:, None]
    sent = tf.scatter_nd(places, tf.ones_like(chosen.values), tf.shape(acc, tf.int64)) > 0
    bad = ~tf.math.is_finite(acc)
    residual.assign(tf.where(bad, old, tf.where(sent, 0.0, acc)))
    if velocity is not None:
        velocity.assign(tf.where(bad, velocity, tf.where(sent, 0.0, moved)))
    return chosen


def choose(acc: tf.Tensor, k: int, seed: int, rule: str) -> tf.Tensor:
    """Return the indices, int32 [k] ascending, that `rule` chooses of float32 [n]; NaN and Inf come
    before all else.

    Where k is a number, the result's shape is known while tracing: collectives count their bytes
    then.
    """
    k, size = tf.cast(k, tf.int32), tf.size(acc)
    checks = [
        tf.debugging.assert_less_equal(
            k, size, f"`k` must be in [1, n] for rule {rule!r}. Keep this variable dense."
        ),
        tf.debugging.assert_greater_equal(
            k, tf.minimum(size, 1), f"`k` must be in [1, n] for rule {rule!r}. Raise `density`."
        ),
    ]
    with tf.control_dependencies(checks):
        key = tf.where(keys(acc) >= NOT_FINITE, 0x7FFFFFFF, keys(acc))
    if rule == "exact":
        # of equal keys, top_k takes the lowest index
        return tf.sort(tf.math.top_k(key, k, sorted=True).indices)
    indices = tf.cond(
        tf.equal(size, 0), lambda: tf.zeros([0], tf.int32), lambda: _choose_mstopk(key, k, seed)
    )
    indices.set_shape([tf.get_static_value(k)])
    return indices


def _choose_mstopk(key: tf.Tensor, k: tf.Tensor, seed: int) -> tf.Tensor:
    bins = tf.bitwise.right_shift(key, BAND_SHIFT)
    # entries in this bin and above
    reached = tf.cumsum(tf.math.bincount(bins, minlength=BANDS, maxlength=BANDS), reverse=True)
    band = tf.reduce_max(tf.where(reached >= k)[:, 0])  # the bin of the k-th largest
    above = tf.cast(tf.where(bins > tf.cast(band, tf.int32))[:, 0], tf.int32)
    inside = tf.cast(tf.where(tf.equal(bins, tf.cast(band, tf.int32)))[:, 0], tf.int32)
    need = k - tf.size(above)
    # Non-finite entries alone reach k: they are all alike, and the lowest indices go first.
    offset = tf.where(band == BANDS - 1, 0, below(seed, tf.size(inside) - need + 1))
    return tf.sort(tf.concat([above, inside[offset : offset + need]], 0))


def merge(indices: tf.Tensor, values: tf.Tensor, size: int) -> tf.Tensor:
    """Add (index, value) pairs into zeros: float32 [size]; the specification of `native.merge`.

    CPUs only add in the order of the list here; elsewhere the order, and so the last bit, is
    TensorFlow's choice.
    """
    return tf.math.unsorted_segment_sum(values, indices, size)


def algorithm1(x: tf.Tensor, k: int, searches: int = 30, seed: int = 0) -> Sparse:
    """Choose k entries of float32 [n] by Algorithm 1 as printed: a pass over |x| for each threshold
    tried.

    Where no threshold with at most k entries is found, the upper one is infinite here (printed: 0,
    which takes everything).
    **Cost:** searches + 5 passes. **Source:** Shi et al. 2021, Algorithm 1.
    """
    a = tf.abs(tf.convert_to_tensor(x))
    mean, largest = tf.reduce_mean(a), tf.reduce_max(a)
    left, right = tf.constant(0.0), tf.constant(1.0)
    k1, k2 = tf.constant(0), tf.size(a)
    upper, lower = tf.constant(float("inf")), tf.constant(0.0)
    for _ in range(searches):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (largest - mean)
        reached = tf.math.count_nonzero(a >= threshold, dtype=tf.int32)
        few = reached <= k
        left, right = tf.where(few, left, ratio), tf.where(few, ratio, right)
        better1, better2 = few & (reached > k1), ~few & (reached < k2)
        k1, upper = tf.where(better1, reached, k1), tf.where(better1, threshold, upper)
        k2, lower = tf.where(better2, reached, k2), tf.where(better2, threshold, lower)
    above = tf.cast(tf.where(a >= upper)[:, 0], tf.int32)
    inside = tf.cast(tf.where((a < upper) & (a >= lower))[:, 0], tf.int32)
    need = k - tf.size(above)
    offset = below(seed, tf.size(inside) - need + 1)
    indices = tf.concat([above, inside[offset : offset + need]], 0)
    return Sparse(indices, tf.gather(x, indices), _size(a))


def _size(gradient: Any) -> Any:
    static = gradient.shape[0]
    return tf.size(gradient) if static is None else static


BLOCK = 65536  # entries that a uint16 offset can tell apart


def value_dtype(wire: str) -> tf.DType:
    """Return the dtype in which a wire format writes values."""
    return tf.as_dtype(wire.partition("/")[2] or "float32")


def wire_words(k: int, size: int, wire: str) -> tuple[int, int, int]:
    """Return the int32 words of a buffer's parts: counts, indices or offsets, values."""
    values = -(-k * value_dtype(wire).size // 4)
    return (
        (-(-size // BLOCK), (k + 1) // 2, values) if wire.startswith("block16") else (0, k, values)
    )


def wire_encode(sparse: Sparse, wire: str) -> tf.Tensor:
    """Write k entries as int32 words; ops/kernels/wire.h has the layout, the module `wire` the
    formats.
    """
    values = _to_words(tf.cast(sparse.values, value_dtype(wire)))
    if not wire.startswith("block16"):
        return tf.concat([sparse.indices, values], axis=0)
    ends = tf.searchsorted(
        sparse.indices, _block_starts(sparse.size) + (BLOCK - 1), side="right", out_type=tf.int32
    )
    counts = ends - tf.concat([[0], ends[:-1]], axis=0)
    offsets = tf.cast(tf.bitwise.bitwise_and(sparse.indices, BLOCK - 1), tf.uint16)
    return tf.concat([counts, _to_words(offsets), values], axis=0)


def wire_decode(
    words: tf.Tensor, k: int, size: int, wire: str, shards: int = 1
) -> tuple[tf.Tensor, tf.Tensor]:
    """Read the entries of p buffers, one after another, p / shards for each shard: int32 [p * k]
    indices, float32 [p * k] values.
    """
    parts = wire_words(k, size, wire)
    counts, places, last = tf.split(tf.reshape(words, [-1, sum(parts)]), parts, axis=1)
    values = tf.reshape(tf.cast(_from_words(last, k, value_dtype(wire)), tf.float32), [-1])
    indices = tf.reshape(places, [-1])
    if wire.startswith("block16"):
        starts = tf.tile(_block_starts(size), [tf.shape(counts)[0]])
        offsets = tf.reshape(tf.cast(_from_words(places, k, tf.uint16), tf.int32), [-1])
        indices = tf.repeat(starts, tf.reshape(counts, [-1])) + offsets
    return tf.reshape(
        tf.reshape(indices, [shards, -1]) + size * tf.range(shards)[:, None], [-1]
    ), values


def _block_starts(size: int) -> tf.Tensor:
    return tf.range(0, size, BLOCK, dtype=tf.int32)


def _to_words(entries: tf.Tensor) -> tf.Tensor:
    if entries.dtype.size == 4:
        return tf.bitcast(entries, tf.int32)
    return tf.bitcast(
        tf.reshape(tf.pad(tf.bitcast(entries, tf.int16), [[0, _size(entries) % 2]]), [-1, 2]),
        tf.int32,
    )


def _from_words(words: tf.Tensor, k: int, dtype: tf.DType) -> tf.Tensor:
    if dtype.size == 4:
        return tf.bitcast(words, dtype)
    return tf.bitcast(
        tf.reshape(tf.bitcast(words, tf.int16), [-1, 2 * words.shape[1]])[:, :k], dtype
    )


def _crc32c_row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected
    return byte


_CRC32C = tuple(map(_crc32c_row, range(256)))


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
