"""LowBitLARS against LARS, its sketches, and training where gradients in few bits fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sent_momenta import gradients, new_weights, wrap

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.optimizers import low_bit_lars

RATE, MOMENTUM = 2.0, 0.9


@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.01}])
def test_in_eight_bits_it_is_lars_on_the_mean_gradient(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sketch with a place for each entry has the norm of the gradient, exactly."""
    monkeypatch.setattr(low_bit_lars, "SKETCH", 1024)
    ranks, steps = 2, 6

    def work(comm: Comm) -> list[np.ndarray]:
        lars = cx.optimizers.LowBitLARS(RATE, MOMENTUM, trust_coefficient=0.01, **options)
        optimizer, weights = wrap(lars, comm, Scheme("asa", wire="int8")), new_weights()
        for step in range(steps):
            optimizer.learning_rate = RATE * step
            optimizer.apply(list(map(tf.constant, gradients(comm.rank, step))), weights)
        return [weight.numpy() for weight in weights]

    first, second = ThreadComm.run(Topology(ranks, 1), work)
    plain = cx.optimizers.LARS(RATE, MOMENTUM, trust_coefficient=0.01, **options)
    weights = new_weights()
    for step in range(steps):
        plain.learning_rate = RATE * step
        parts = zip(*(gradients(rank, step) for rank in range(ranks)), strict=True)
        plain.apply([tf.constant(sum(part) / ranks) for part in parts], weights)
    for result, other, weight, before in zip(first, second, weights, new_weights(), strict=True):
        np.testing.assert_array_equal(result, other)
        moved = np.abs(weight.numpy() - before.numpy()).max()
        np.testing.assert_allclose(result, weight.numpy(), atol=0.02 * moved)


def test_a_sketch_has_the_norm_of_the_gradient_on_average() -> None:
    """Also of a gradient that one of 64 channels has alone."""
    optimizer, weight = cx.optimizers.LowBitLARS(), keras.Variable(np.zeros([3, 64, 64], "float32"))
    optimizer.build([weight])
    gradient = np.zeros(weight.shape, "float32")
    gradient[..., 5] = np.random.default_rng(1).normal(size=[3, 64])
    squares = []
    for step in range(100):
        optimizer.iterations.assign(step)
        sketch = optimizer.sketch(tf.constant(gradient), 0).numpy()
        squares.append(np.square(sketch).sum() / np.square(gradient).sum())
    assert abs(np.mean(squares) - 1) < 0.08
    assert 0.7 < np.std(squares) / np.sqrt(2 / low_bit_lars.SKETCH) < 1.3


def test_a_step_stays_short_where_gradients_vanish() -> None:
    """Rounding errors of the momentum then remain, and the mean gradient's norm of 0 divides."""

    def work(comm: Comm) -> float:
        optimizer, weights = wrap(cx.optimizers.LowBitLARS(RATE, MOMENTUM), comm), new_weights()[:1]
        for step in range(4):
            gradient = gradients(comm.rank, step)[0] * (step < 3)
            before, momentum = weights[0].numpy(), optimizer.momentums[0].numpy() if step else 0.0
            optimizer.apply([tf.constant(gradient)], weights)
        step = weights[0].numpy() - before - MOMENTUM * momentum
        return float(np.linalg.norm(step) / np.linalg.norm(before))

    relative = ThreadComm.run(Topology(2, 1), work)[0]
    assert 0 < relative < 1.01 * low_bit_lars.INFLATION * RATE * 0.001


def test_not_wrapped_it_is_lars() -> None:
    results = []
    for kind in (cx.optimizers.LowBitLARS, cx.optimizers.LARS):
        optimizer, weights = kind(RATE, MOMENTUM, weight_decay=0.01), new_weights()
        for step in range(3):
            optimizer.apply(list(map(tf.constant, gradients(0, step))), weights)
        results.append([weight.numpy() for weight in weights])
    for result, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(result, expected)


# Its definition is tested above, and the training of its base class with LowBitSGD
@pytest.mark.exhaustive
def test_it_trains_in_two_bits_where_gradients_diverge() -> None:
    """Noise of gradients is much larger than the gradient, as it is late in a training."""
    truth = np.random.default_rng(0).normal(size=(32, 32)).astype("float32")

    def error(make: Callable[..., keras.optimizers.Optimizer], scheme: Scheme) -> float:
        def work(comm: Comm) -> np.ndarray:
            optimizer = wrap(
                make(0.0, MOMENTUM, trust_coefficient=0.1), comm, scheme, check_replicas_every=50
            )
            weights = [keras.Variable(truth[::-1].copy(), name="kernel")]
            noise = np.random.default_rng([1, comm.rank])
            for step in range(80):
                optimizer.learning_rate = 1 - step / 80
                gradient = weights[0].numpy() - truth + noise.normal(size=truth.shape)
                optimizer.apply([tf.constant(gradient, tf.float32)], weights)
            return weights[0].numpy()

        return float(np.square(ThreadComm.run(Topology(2, 1), work)[0] - truth).mean())

    lars = error(cx.optimizers.LARS, Scheme())
    momenta = error(cx.optimizers.LowBitLARS, Scheme("asa", wire="int2"))
    gradients_alone = error(cx.optimizers.LARS, Scheme("asa", wire="int2"))
    assert momenta < 1.25 * lars
    assert gradients_alone > 5 * lars


def test_its_config_makes_an_equal_one() -> None:
    lars = cx.optimizers.LowBitLARS(
        0.1, 0.8, 10, nesterov=True, weight_decay=0.1, exclude=["*embedding*"], norms="auto"
    )
    again = keras.optimizers.deserialize(keras.optimizers.serialize(lars))
    assert type(again) is cx.optimizers.LowBitLARS
    assert again.get_config() == lars.get_config()


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"momentum": 0.0}, "momentum=0"),
        ({"dense_below": -1}, "dense_below"),
    ],
)
def test_refused_options(options: dict[str, Any], received: str) -> None:
    with pytest.raises(cx.ConfigurationError, match=received):
        cx.optimizers.LowBitLARS(**options)
