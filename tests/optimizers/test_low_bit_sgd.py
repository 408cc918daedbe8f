"""LowBitSGD against NumPy and Keras's SGD, and a training in which low-bit gradients diverge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from sent_momenta import gradients, new_weights, wrap

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology

RATE, MOMENTUM = 0.01, 0.9


def trained(
    make: Callable[[], keras.optimizers.Optimizer], scheme: Scheme, ranks: int, steps: int
) -> list[np.ndarray]:
    """Return the weights after some steps, which all ranks have."""

    def work(comm: Comm) -> list[np.ndarray]:
        optimizer, weights = wrap(make(), comm, scheme), new_weights()
        for step in range(steps):
            optimizer.learning_rate = RATE * (1 + step)
            optimizer.apply(list(map(tf.constant, gradients(comm.rank, step))), weights)
        return [one.numpy() for one in weights]

    first, *others = ThreadComm.run(Topology(ranks, 1), work)
    for other in others:
        for one, another in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, another)
    return first


@pytest.mark.parametrize(
    ("decay", "nesterov"),
    [(None, False), case(None, True, kept=False), case(0.1, False, kept=False), (0.1, True)],
)
def test_in_eight_bits_it_is_sgd_on_the_mean_gradient(nesterov: bool, decay: float | None) -> None:
    """At a rate that rises: a residual must not shrink, because the rate is in it."""
    ranks, steps = 3, 12
    options: dict[str, Any] = {"nesterov": nesterov, "weight_decay": decay}
    found = trained(
        lambda: cx.optimizers.LowBitSGD(RATE, MOMENTUM, **options),
        Scheme("asa", wire="int8"),
        ranks,
        steps,
    )
    plain, weights = keras.optimizers.SGD(RATE, MOMENTUM, **options), new_weights()
    for step in range(steps):
        plain.learning_rate = RATE * (1 + step)
        parts = zip(*(gradients(rank, step) for rank in range(ranks)), strict=True)
        plain.apply([tf.constant(sum(some) / ranks) for some in parts], weights)
    moved = np.abs(weights[0].numpy() - new_weights()[0].numpy()).max()
    np.testing.assert_allclose(found[0], weights[0].numpy(), atol=0.01 * moved)
    np.testing.assert_allclose(found[1], weights[1].numpy(), atol=0.01 * moved)


def test_in_two_bits_the_sum_of_what_was_applied_and_what_waits_is_that_of_sgd() -> None:
    """A residual enters the momentum, so weight - rate residual / (1 - momentum) is conserved."""

    def work(comm: Comm) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        optimizer, weights = wrap(cx.optimizers.LowBitSGD(RATE, MOMENTUM), comm), new_weights()
        for step in range(5):
            optimizer.apply(list(map(tf.constant, gradients(comm.rank, step))), weights)
        residuals = optimizer.exchanger.export().residuals
        return weights[0].numpy(), optimizer.momentums[0].numpy(), residuals[weights[0].path]

    (weight, momentum, one), (_, _, other) = ThreadComm.run(Topology(2, 1), work)
    waits = -RATE * (one + other).reshape(weight.shape) / 2
    plain, weights = keras.optimizers.SGD(RATE, MOMENTUM), new_weights()
    for step in range(5):
        mean = (gradients(0, step)[0] + gradients(1, step)[0]) / 2
        plain.apply([tf.constant(mean)], weights[:1])
    far = MOMENTUM / (1 - MOMENTUM)
    expected = weights[0].numpy() + far * plain.momentums[0].numpy()
    np.testing.assert_allclose(
        weight + far * momentum + waits / (1 - MOMENTUM), expected, atol=1e-5
    )
    assert np.abs(waits).max() > 1e-3


def test_it_takes_over_what_a_sparse_scheme_has_not_sent() -> None:
    """Residuals of SGD and of LowBitSGD have one unit: zero gradients then send the rest."""

    def work(comm: Comm) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights, sparse = new_weights()[:1], Scheme("allgather", "exact", 0.1, dense_below=0)
        plain = wrap(keras.optimizers.SGD(RATE), comm, sparse)
        for step in range(3):
            plain.apply([tf.constant(gradients(comm.rank, step)[0])], weights)
        (residual,) = plain.exchanger.export().residuals.values()
        before, low = weights[0].numpy(), cx.optimizers.LowBitSGD(RATE, MOMENTUM)
        optimizer = wrap(low, comm, Scheme("asa", wire="int8"))
        optimizer.apply([tf.zeros(weights[0].shape)], weights)
        return before, weights[0].numpy(), residual

    (before, after, one), (_, _, other) = ThreadComm.run(Topology(2, 1), work)
    mean = (one + other).reshape(before.shape) / 2
    assert np.abs(mean).max() > 1
    np.testing.assert_allclose(after, before - RATE * mean, atol=0.02 * RATE * np.abs(mean).max())


def test_a_step_at_rate_zero_decays_the_momentum() -> None:
    optimizer, weights = cx.optimizers.LowBitSGD(RATE, MOMENTUM), new_weights()
    optimizer.apply(list(map(tf.constant, gradients(0, 0))), weights)
    momentum, before = optimizer.momentums[0].numpy(), weights[0].numpy()
    optimizer.learning_rate = 0.0
    optimizer.apply(list(map(tf.constant, gradients(0, 1))), weights)
    np.testing.assert_allclose(optimizer.momentums[0].numpy(), MOMENTUM * momentum, rtol=1e-6)
    np.testing.assert_allclose(weights[0].numpy(), before + MOMENTUM * momentum, rtol=1e-5)


def test_not_wrapped_it_is_sgd() -> None:
    optimizers = cx.optimizers.LowBitSGD(RATE, MOMENTUM), keras.optimizers.SGD(RATE, MOMENTUM)
    found = []
    for optimizer in optimizers:
        weights = new_weights()
        for step in range(3):
            optimizer.apply(list(map(tf.constant, gradients(0, step))), weights)
        found.append([one.numpy() for one in weights])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.extended
def test_it_trains_in_two_bits_where_gradients_diverge() -> None:
    """Noise of gradients is much larger than the gradient, as it is late in a training."""
    numbers = np.random.default_rng(0)
    truth = numbers.normal(size=(32, 32)).astype("float32")

    def error(make: Callable[[], keras.optimizers.Optimizer], scheme: Scheme) -> float:
        def work(comm: Comm) -> np.ndarray:
            optimizer = wrap(make(), comm, scheme, check_replicas_every=50)
            weights = [keras.Variable(np.zeros(truth.shape, "float32"), name="kernel")]
            noise = np.random.default_rng([1, comm.rank])
            for step in range(150):
                optimizer.learning_rate = 0.05 * (1 - step / 150)
                gradient = weights[0].numpy() - truth + noise.normal(size=truth.shape)
                optimizer.apply([tf.constant(gradient, tf.float32)], weights)
            return weights[0].numpy()

        return float(np.square(ThreadComm.run(Topology(2, 1), work)[0] - truth).mean())

    sgd = error(lambda: keras.optimizers.SGD(0.1, MOMENTUM), Scheme())
    momenta = error(lambda: cx.optimizers.LowBitSGD(0.1, MOMENTUM), Scheme("asa", wire="int2"))
    gradients_alone = error(lambda: keras.optimizers.SGD(0.1, MOMENTUM), Scheme("asa", wire="int1"))
    assert momenta < 1.25 * sgd
    assert gradients_alone > 4 * sgd


def test_its_config_makes_an_equal_one() -> None:
    sgd = cx.optimizers.LowBitSGD(0.1, 0.8, True, ["*embedding*"], 10, weight_decay=0.1)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(sgd))
    assert type(again) is cx.optimizers.LowBitSGD
    assert again.get_config() == sgd.get_config()


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"momentum": 0.0}, "momentum=0"),
        ({"momentum": 1.0}, "momentum"),
        ({"exclude": "*bias"}, r"`exclude`.*\*bias"),
        ({"dense_below": -1}, "dense_below"),
    ],
)
def test_refused_options(options: dict[str, Any], received: str) -> None:
    with pytest.raises(cx.ConfigurationError, match=received):
        cx.optimizers.LowBitSGD(**options)
