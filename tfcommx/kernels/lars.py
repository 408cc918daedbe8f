"""LARS for all variables in two passes: their squared norms, then the update by their rates."""

from collections.abc import Sequence

import tensorflow as tf

from tfcommx.kernels import loader

LANES, CHUNK = 64, 4096  # As in ops/kernels/norms.h


def squared_norms(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Add the squares of each tensor's entries.

    >>> squared_norms([tf.constant([3.0, 4.0]), tf.constant([[2.0]], tf.float16)]).numpy().tolist()
    [25.0, 4.0]

    Args:
        tensors: one or more, float32, float16 or bfloat16, of any shape that is known while
            tracing; the norm of an empty one is 0.

    Returns:
        float32 [number of tensors]. Infinite if the sum exceeds float32 (a norm above 1.8e19) or an
        entry is infinite, NaN if an entry is NaN; entries below 1e-19 count as zero.

    **Ranks:** local; equal tensors give equal bits on every rank.
    **Cost:** reads each entry once, in one operation; temporary memory for 1/4096 of the entries.
    """
    ops = loader.library()
    if ops is None:
        return squared_norms_definition(tensors)
    return ops.tfcommx_squared_norms(tensors=tensors)


def squared_norms_definition(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Define `squared_norms` in plain TensorFlow."""
    return tf.stack([_squared_norm(tensor) for tensor in tensors])


def _squared_norm(tensor: tf.Tensor) -> tf.Tensor:
    # Added in an order that depends only on the tensor's size (ops/kernels/norms.h), so that every
    # rank, device and number of threads gets the same bits
    flat = tf.cast(tf.reshape(tensor, [-1]), tf.float32)
    if flat.shape[0] == 0:
        return tf.constant(0.0)
    padded = tf.pad(flat, [[0, -flat.shape[0] % CHUNK]])  # Zeros change no sum
    rows = tf.unstack(tf.square(tf.reshape(padded, [-1, CHUNK // LANES, LANES])), axis=1)
    lanes = rows[0]
    for row in rows[1:]:
        lanes = lanes + row
    chunks = _fold(tf.transpose(lanes))
    return _fold(chunks)


def _fold(parts: tf.Tensor) -> tf.Tensor:
    """Add along the first dimension: the second half to the first, until one entry is left."""
    while (count := parts.shape[0]) > 1:
        half = (count + 1) // 2
        added = parts[: count - half] + parts[half:]
        parts = tf.concat([added, parts[count - half : half]], axis=0)
    return parts[0]


def lars_update(
    weights: Sequence[tf.Variable],
    momenta: Sequence[tf.Variable],
    gradients: Sequence[tf.Tensor],
    rates: tf.Tensor,
    decays: Sequence[float],
    momentum: float,
    nesterov: bool = False,
) -> None:
    """Update weights and momenta in place.

    Per entry: d = g + decay w; m = momentum m - rate d; w = w + m, or with Nesterov
    w + (momentum m - rate d) with the new m.

    >>> weight, velocity = tf.Variable([1.0]), tf.Variable([0.0])
    >>> lars_update([weight], [velocity], [tf.constant([2.0])], tf.constant([0.25]), [0.0], 0.9)
    >>> weight.numpy().tolist(), velocity.numpy().tolist()
    ([0.5], [-0.5])

    Args:
        weights: float32 variables, of any shapes.
        momenta: float32 variables of the same shapes.
        gradients: float32, of the same shapes.
        rates: float32 [number of variables], learning rate times trust ratio of each.
        momentum: in [0, 1).

    **Ranks:** local; equal inputs give equal bits on every rank.
    **Cost:** reads three vectors and writes two, in one operation. A variable whose value has
    other references, such as one read eagerly before, is copied first.
    **Raises:** InvalidArgumentError for other shapes or types, or a variable given twice.
    """
    ops = loader.library()
    if ops is None:
        lars_update_definition(weights, momenta, gradients, rates, decays, momentum, nesterov)
        return
    ops.tfcommx_lars_update(
        weights=[variable.handle for variable in weights],
        momenta=[variable.handle for variable in momenta],
        gradients=gradients,
        rates=rates,
        decays=decays,
        momentum=momentum,
        nesterov=nesterov,
    )


def lars_update_definition(
    weights: Sequence[tf.Variable],
    momenta: Sequence[tf.Variable],
    gradients: Sequence[tf.Tensor],
    rates: tf.Tensor,
    decays: Sequence[float],
    momentum: float,
    nesterov: bool = False,
) -> None:
    """Define `lars_update` in plain TensorFlow."""
    parts = zip(weights, momenta, gradients, tf.unstack(rates), decays, strict=True)
    for weight, velocity, gradient, rate, decay in parts:
        gradient = tf.cast(gradient, weight.dtype)
        decayed = gradient + decay * weight if decay else gradient
        step = tf.cast(rate, weight.dtype) * decayed
        moved = velocity.assign(momentum * velocity - step)
        weight.assign_add(momentum * moved - step if nesterov else moved)
