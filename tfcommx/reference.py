"""Every kernel in plain TensorFlow: the readable specification, and what works where there is no native library.

Magnitudes are compared as the bits of |x|, taken as an integer: for finite floats the order is the same, and no denormal is
lost in the comparison.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcommx.terms import Sparse

BAND_SHIFT = 11  # a band of mstopk: keys that agree above this bit, so equal exponent and first twelve mantissa bits
BANDS = 2 ** (31 - BAND_SHIFT)
NOT_FINITE = 0x7F800000  # keys of infinities and NaNs start here


def keys(x: tf.Tensor) -> tf.Tensor:
    """Return the bits of |x| as int32 [n], for float32 [n]: ordered as the magnitudes are."""
    return tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7FFFFFFF)


def splitmix64(seed: Any) -> tf.Tensor:
    """Hash an int64 to a uint64. **Source:** Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014."""
    def shifted(z: tf.Tensor, bits: int) -> tf.Tensor:
        return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, tf.constant(bits, tf.uint64)))

    z = tf.bitcast(tf.cast(seed, tf.int64), tf.uint64) + tf.constant(0x9E3779B97F4A7C15, tf.uint64)
    z = shifted(z, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    z = shifted(z, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return shifted(z, 31)


def below(seed: Any, count: tf.Tensor) -> tf.Tensor:
    """Return the seed's number in [0, count), int32: each equally likely, up to 2^-32. 1 <= count < 2^31."""
    number = tf.bitcast(tf.bitwise.right_shift(splitmix64(seed), tf.constant(1, tf.uint64)), tf.int64)
    return tf.cast(tf.math.floormod(number, tf.cast(count, tf.int64)), tf.int32)


def select(gradient: tf.Tensor, k: int, seed: int, rule: str) -> Sparse:
    """Choose k entries of a gradient by magnitude; the specification of `native.select`.

    **Cost:** a dozen passes; `exact` sorts on one thread.
    **Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, 2021,
    Algorithm 1, with thresholds at the edges of bins in place of its binary search.
    """
    acc = tf.cast(gradient, tf.float32)
    indices = choose(acc, k, seed, rule)
    return Sparse(indices, tf.gather(acc, indices), _size(gradient))


def select_with_residual(gradient: tf.Tensor, residual: tf.Variable, k: int, seed: int, rule: str) -> Sparse:
    """Choose k entries of gradient + residual, keep the rest; the specification of `native.select_with_residual`.

    A NaN or infinite sum leaves the residual's entry as it was, chosen or not.
    """
    old = tf.convert_to_tensor(residual)
    acc = tf.cast(gradient, tf.float32) + old
    indices = choose(acc, k, seed, rule)
    chosen = tf.scatter_nd(indices[:, None], tf.ones_like(indices), tf.shape(acc)) > 0
    residual.assign(tf.where(keys(acc) >= NOT_FINITE, old, tf.where(chosen, 0.0, acc)))
    return Sparse(indices, tf.gather(acc, indices), _size(gradient))


def choose(acc: tf.Tensor, k: int, seed: int, rule: str) -> tf.Tensor:
    """Return the indices, int32 [k] ascending, that `rule` chooses of float32 [n]; NaN and Inf come before all else."""
    k, size = tf.cast(k, tf.int32), tf.size(acc)
    checks = [
        tf.debugging.assert_less_equal(k, size, f"`k` must be in [1, n] for rule {rule!r}. Keep this variable dense."),
        tf.debugging.assert_greater_equal(k, tf.minimum(size, 1), f"`k` must be in [1, n] for rule {rule!r}. Raise `density`."),
    ]
    with tf.control_dependencies(checks):
        key = tf.where(keys(acc) >= NOT_FINITE, 0x7FFFFFFF, keys(acc))
    if rule == "exact":
        return tf.sort(tf.math.top_k(key, k, sorted=True).indices)  # of equal keys, top_k takes the lowest index
    return tf.cond(tf.equal(size, 0), lambda: tf.zeros([0], tf.int32), lambda: _choose_mstopk(key, k, seed))


def _choose_mstopk(key: tf.Tensor, k: tf.Tensor, seed: int) -> tf.Tensor:
    bins = tf.bitwise.right_shift(key, BAND_SHIFT)
    reached = tf.cumsum(tf.math.bincount(bins, minlength=BANDS, maxlength=BANDS), reverse=True)  # entries in this bin and above
    band = tf.reduce_max(tf.where(reached >= k)[:, 0])  # the bin of the k-th largest
    above = tf.cast(tf.where(bins > tf.cast(band, tf.int32))[:, 0], tf.int32)
    inside = tf.cast(tf.where(tf.equal(bins, tf.cast(band, tf.int32)))[:, 0], tf.int32)
    need = k - tf.size(above)
    # Non-finite entries alone reach k: they are all alike, and the lowest indices go first.
    offset = tf.where(band == BANDS - 1, 0, below(seed, tf.size(inside) - need + 1))
    return tf.sort(tf.concat([above, inside[offset:offset + need]], 0))


def merge(indices: tf.Tensor, values: tf.Tensor, size: int) -> tf.Tensor:
    """Add (index, value) pairs into zeros: float32 [size]; the specification of `native.merge`.

    CPUs only add in the order of the list here; elsewhere the order, and so the last bit, is TensorFlow's choice.
    """
    return tf.math.unsorted_segment_sum(values, indices, size)


def algorithm1(x: tf.Tensor, k: int, searches: int = 30, seed: int = 0) -> Sparse:
    """Choose k entries of float32 [n] by Algorithm 1 as printed: a pass over |x| for each threshold tried.

    Where no threshold with at most k entries is found, the upper one is infinite here (printed: 0, which takes everything).
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
    indices = tf.concat([above, inside[offset:offset + need]], 0)
    return Sparse(indices, tf.gather(x, indices), _size(a))


def _size(gradient: Any) -> Any:
    static = gradient.shape[0]
    return tf.size(gradient) if static is None else static
