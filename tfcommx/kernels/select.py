"""Select: k entries of a gradient by magnitude, with and without error feedback."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcommx.core import PlanError, Sparse
from tfcommx.kernels import loader, traced

# A band of mstopk: keys that agree above this bit, in exponent and first twelve mantissa bits
BAND_SHIFT = 11
BANDS = 2 ** (31 - BAND_SHIFT)
NOT_FINITE = 0x7F800000  # Keys of infinities and NaNs start here


def select(gradient: Any, k: int, seed: int, rule: str) -> Sparse:
    """Choose k entries of a gradient by magnitude.

    >>> chosen = select(tf.constant([0.5, -5.0, 3.0, 0.0]), k=2, seed=0, rule="exact")
    >>> chosen.indices.numpy().tolist(), chosen.values.numpy().tolist(), chosen.size
    ([1, 2], [-5.0, 3.0], 4)

    Args:
        gradient: float32 | float16 | bfloat16 [n], n < 2^31.
        k: entries to choose, in [1, n].
        seed: int64, for mstopk's random run.
        rule: "exact" or "mstopk"; ops/kernels/select.h has their semantics.

    Returns:
        Sparse: indices int32 [k] ascending and unique, values float32 [k].

    **Ranks:** local; equal inputs give equal results on every rank, with any number of threads.
    **Cost:** one pass over the gradient if the prediction of a sample fits a list, otherwise two;
    no host synchronisation.
    **Raises:** InvalidArgumentError if k or a shape is out of range.
    """
    ops = loader.library()
    if ops is None:
        return select_definition(gradient, k, seed, rule)
    indices, values = ops.tfcommx_select(
        gradient=gradient, k=traced.int64(k), seed=traced.int64(seed), rule=rule
    )
    return Sparse(indices, values, traced.length(gradient))


def select_with_residual(
    gradient: Any,
    residual: tf.Variable,
    k: int,
    seed: int,
    rule: str,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Choose k entries of gradient + residual, as `select`; the residual keeps the others.

    >>> residual = tf.Variable([0.0, 1.0, 0.0, 2.0])
    >>> chosen = select_with_residual(tf.constant([0.5, 0.0, -3.0, 0.0]), residual, 1, 0, "exact")
    >>> chosen.indices.numpy().tolist(), residual.numpy().tolist()
    ([2], [0.5, 1.0, 0.0, 2.0])

    With a velocity, it applies momentum correction: velocity = momentum * velocity + gradient
    replaces the gradient, and chosen entries become zero in the velocity, too.

    Args:
        gradient, k, seed, rule: as `select`.
        residual, velocity: float32 [n] variables, updated in place.
        momentum: in [0, 1).

    **Ranks:** local.
    **Cost:** one pass that reads the gradient and reads and writes the residual (and the velocity),
    as an addition would, if the prediction of a sample fits a list; otherwise a second pass that
    reads the residual. Extra memory <= 2 % of a float32 gradient's at k <= n / 100, n >= 2^23.
    **Raises:** InvalidArgumentError if k, a shape, the momentum or a variable's type is wrong;
    FailedPreconditionError if a variable is not initialised.
    **Source:** Lin et al., Deep Gradient Compression, 2018, section 3.2, for the velocity.
    """
    ops = loader.library()
    if ops is None:
        return select_with_residual_definition(
            gradient, residual, k, seed, rule, velocity, momentum
        )
    arguments = {
        "gradient": gradient,
        "residual": residual.handle,
        "k": traced.int64(k),
        "seed": traced.int64(seed),
        "rule": rule,
    }
    if velocity is None:
        indices, values = ops.tfcommx_select_residual(**arguments)
    else:
        indices, values = ops.tfcommx_select_momentum(
            **arguments, velocity=velocity.handle, momentum=momentum
        )
    return Sparse(indices, values, traced.length(gradient))


def select_definition(gradient: tf.Tensor, k: int, seed: int, rule: str) -> Sparse:
    """Define `select` in plain TensorFlow.

    If k is a number, the result's shape is known while tracing, when collectives count their bytes.

    **Cost:** a dozen passes; `exact` sorts on one thread.
    **Source:** Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters, 2021, Algorithm 1, with thresholds at the edges of bins instead of its binary search,
    which `selection.rules.BinarySearch` has.
    """
    acc = tf.cast(gradient, tf.float32)
    indices = _choose(acc, k, seed, rule)
    return Sparse(indices, tf.gather(acc, indices), traced.length(gradient))


def select_with_residual_definition(
    gradient: tf.Tensor,
    residual: tf.Variable,
    k: int,
    seed: int,
    rule: str,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Define `select_with_residual` in plain TensorFlow."""
    return with_error_feedback(
        lambda acc: select_definition(acc, k, seed, rule), gradient, residual, velocity, momentum
    )


def with_error_feedback(
    choose: Callable[[tf.Tensor], Sparse],
    gradient: tf.Tensor,
    residual: tf.Variable,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Make any choice from gradient + residual, and keep the other entries in the residual.

    With a velocity u, the choice is from the accumulated velocity instead of the accumulated
    gradient, because delayed entries would otherwise lose their momentum:

        u = momentum u + g;   acc = r + u;   the chosen entries of acc travel, and u and r are
        zeroed there (factor masking)

    Args:
        choose: float32 [n] -> Sparse.
        gradient: float [n].
        residual, velocity: float32 [n] variables, updated in place. If the sum is NaN or
            infinite, the entries of both are unchanged, whether chosen or not.
        momentum: in [0, 1).

    **Cost:** about five passes in addition to the choice, four more with a velocity.
    **Source:** Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Stich et al., Sparsified SGD
    with Memory, 2018; Lin et al., Deep Gradient Compression, 2018, section 3.2 and Algorithm 4, for
    the velocity.
    """
    old = tf.convert_to_tensor(residual)
    moved = tf.cast(gradient, tf.float32)
    if velocity is not None:
        moved = tf.constant(momentum, tf.float32) * velocity + moved
    acc = moved + old
    chosen = choose(acc)
    # In int64, because TensorFlow moves a GPU's int32 through the host
    positions = tf.cast(chosen.indices, tf.int64)[:, None]
    sent = tf.scatter_nd(positions, tf.ones_like(chosen.values), tf.shape(acc, tf.int64)) > 0
    # A NaN is sent once, by `choose`; in the residual it would return in every step
    bad = ~tf.math.is_finite(acc)
    residual.assign(tf.where(bad, old, tf.where(sent, 0.0, acc)))
    if velocity is not None:
        velocity.assign(tf.where(bad, velocity, tf.where(sent, 0.0, moved)))
    return chosen


def splitmix64(seed: Any) -> tf.Tensor:
    """Hash an int64 to a uint64.

    **Source:** Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """

    def shifted(z: tf.Tensor, bits: int) -> tf.Tensor:
        return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, tf.constant(bits, tf.uint64)))

    z = tf.bitcast(tf.cast(seed, tf.int64), tf.uint64) + tf.constant(0x9E3779B97F4A7C15, tf.uint64)
    z = shifted(z, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    z = shifted(z, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return shifted(z, 31)


def below(seed: Any, count: tf.Tensor) -> tf.Tensor:
    """Draw the seed's int32 in [0, count), equally likely up to 2^-32; 1 <= count < 2^31."""
    # Without the highest bit, so that the number is not negative as int64
    half = tf.bitwise.right_shift(splitmix64(seed), tf.constant(1, tf.uint64))
    number = tf.bitcast(half, tf.int64)
    return tf.cast(tf.math.floormod(number, tf.cast(count, tf.int64)), tf.int32)


def _keys(x: tf.Tensor) -> tf.Tensor:
    """Return the bits of |x| as int32 [n], for float32 [n]."""
    # In the order of the magnitudes; a comparison of floats may take all denormals for zero
    return tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7FFFFFFF)


def check_k(k: Any, gradient: tf.Tensor, rule: str) -> list[tf.Operation | None]:
    """Require k entries in [1, n], or none of none; return the checks of a k that is a tensor."""
    size = traced.length(gradient)
    problem = f"Rule {rule!r} needs `k` in [1, n]. Received k={{}}, n={{}}. Change `density`."
    if isinstance(k, int) and isinstance(size, int):
        if not min(size, 1) <= k <= size:
            raise PlanError(problem.format(k, size))
        return []
    k, problem = tf.cast(k, tf.int32), problem.format("a tensor", size)
    # A k beyond n would choose fewer entries than the buffers of the other ranks have room for
    return [
        tf.debugging.assert_less_equal(k, size, problem),
        tf.debugging.assert_greater_equal(k, tf.minimum(size, 1), problem),
    ]


def _choose(acc: tf.Tensor, k: int, seed: int, rule: str) -> tf.Tensor:
    """Choose indices, int32 [k] ascending, of float32 [n]; NaN and Inf first."""
    k, size = tf.cast(k, tf.int32), tf.size(acc)
    with tf.control_dependencies(check_k(k, acc, rule)):
        # NaN and Inf have the highest key: they are sent, and stay in no residual (law 5)
        key = tf.where(_keys(acc) >= NOT_FINITE, 0x7FFFFFFF, _keys(acc))
    if rule == "exact":
        # top_k takes the lowest index of equal keys
        return tf.sort(tf.math.top_k(key, k, sorted=True).indices)
    indices = tf.cond(
        tf.equal(size, 0), lambda: tf.zeros([0], tf.int32), lambda: _choose_mstopk(key, k, seed)
    )
    indices.set_shape([tf.get_static_value(k)])
    return indices


def _choose_mstopk(key: tf.Tensor, k: tf.Tensor, seed: int) -> tf.Tensor:
    bins = tf.bitwise.right_shift(key, BAND_SHIFT)
    # Number of entries in each bin and above
    reached = tf.cumsum(tf.math.bincount(bins, minlength=BANDS, maxlength=BANDS), reverse=True)
    band = tf.reduce_max(tf.where(reached >= k)[:, 0])  # The bin of the k-th largest
    above = tf.cast(tf.where(bins > tf.cast(band, tf.int32))[:, 0], tf.int32)
    inside = tf.cast(tf.where(tf.equal(bins, tf.cast(band, tf.int32)))[:, 0], tf.int32)
    need = k - tf.size(above)
    # All non-finite keys are equal; if they alone reach k, the lowest indices are chosen
    offset = tf.where(band == BANDS - 1, 0, below(seed, tf.size(inside) - need + 1))
    # The run starts at random, because the band's lowest indices would otherwise win in every step
    return tf.sort(tf.concat([above, inside[offset : offset + need]], 0))
