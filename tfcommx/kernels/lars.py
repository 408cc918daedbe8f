"""The update of LARS for all variables in one pass, once their rates are known."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfcommx.kernels import loader


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
        decays: weight decay of each.
        momentum: in [0, 1).
        nesterov: whether the weights move on by the momentum that follows.

    **Ranks:** local; equal inputs give equal bits on every rank.
    **Cost:** reads three vectors and writes two, in one operation. A variable whose value is still
    held by others, such as one read eagerly before, is copied first.
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
