"""OneBitAdam against NumPy, and the variables and entries for which 1 bit would do harm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sent_momenta import SHAPES, MomentumInOneBit, final_error, gradients, new_weights, wrap

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.optimizers import frozen_moments

ONE_BIT = Scheme("asa", wire="int1")
RATE, BETA_1, BETA_2, EPSILON = 0.01, 0.9, 0.99, 1e-7


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_follows_its_definition(decay: float) -> None:
    ranks, learning, steps = 2, 4, 10

    def work(comm: Comm) -> dict[str, Any]:
        adam = cx.optimizers.OneBitAdam(
            RATE, BETA_1, BETA_2, EPSILON, learning, weight_decay=decay or None
        )
        optimizer, weights = wrap(adam, comm), new_weights()
        found = {}
        for step in range(steps):
            optimizer.apply(list(map(tf.constant, gradients(comm.rank, step))), weights)
            if step == learning - 1:
                moments = optimizer._momentums[0], optimizer._velocities[0]
                found["then"] = [one.numpy() for one in (weights[0], *moments)]
                found["residual"] = max(
                    optimizer.exchanger.export().residuals.values(), key=np.size
                )
        found["now"] = [one.numpy() for one in (*weights, optimizer._momentums[0])]
        found["frozen_at"] = int(optimizer.frozen_at.numpy())
        return found

    first, second = ThreadComm.run(Topology(ranks, 1), work)
    for one, other in zip(first["now"], second["now"], strict=True):
        np.testing.assert_array_equal(one, other)
    assert first["frozen_at"] == learning
    # The first phase is Adam, but for the rounding of gradients to bfloat16
    plain, weights = keras.optimizers.Adam(RATE, BETA_1, BETA_2, EPSILON), new_weights()
    plain.weight_decay = decay or None
    for step in range(steps):
        parts = zip(*(gradients(rank, step) for rank in range(ranks)), strict=True)
        plain.apply([tf.constant(sum(some) / ranks) for some in parts], weights)
        if step == learning - 1:
            np.testing.assert_allclose(first["then"][0], weights[0].numpy(), atol=2e-3)
            squares = plain._velocities[0].numpy() / (1 - BETA_2**learning)
            squares = np.maximum(squares, frozen_moments.FLOOR * squares.mean())
            np.testing.assert_allclose(first["then"][2], squares, rtol=0.02)
    # ... and so it stays for the variable that sends no momentum
    np.testing.assert_allclose(first["now"][1], weights[1].numpy(), atol=2e-3)
    residuals = np.stack([first["residual"], second["residual"]])
    assert residuals.any()
    weight, mean, square = (one.ravel() for one in first["then"])
    momentum, largest = MomentumInOneBit(residuals, mean, BETA_1), 0.0
    for step in range(learning, steps):
        momentum.step([gradients(rank, step)[0] for rank in range(ranks)])
        update = momentum.mean / (1 - BETA_1 ** (step + 1)) / (np.sqrt(square) + EPSILON)
        weight = weight * (1 - decay * RATE) - RATE * np.clip(update, -1, 1)
        largest = max(largest, np.abs(update).max())
    assert largest > 2  # else the bound would not show
    np.testing.assert_allclose(first["now"][2].ravel(), momentum.mean, atol=1e-5)
    np.testing.assert_allclose(first["now"][0].ravel(), weight, atol=1e-5)


def test_each_rank_clips_its_own_gradient_in_the_second_phase() -> None:
    def work(comm: Comm) -> np.ndarray:
        adam = cx.optimizers.OneBitAdam(RATE, freeze_after=1, clipnorm=0.5)
        optimizer, weights = wrap(adam, comm, Scheme("asa", wire="int8")), new_weights()
        for scale in (1.0, 1e4 if comm.rank else 0.0):
            parts = [scale * part for part in gradients(0, 0)]
            optimizer.apply(list(map(tf.constant, parts)), weights)
        return optimizer._momentums[0].numpy()

    mean = ThreadComm.run(Topology(2, 1), work)[0]
    gradient = gradients(0, 0)[0]
    clipped = 0.5 * gradient / np.linalg.norm(gradient)
    expected = BETA_1 * (1 - BETA_1) * clipped + (1 - BETA_1) * clipped / 2
    np.testing.assert_allclose(mean, expected, atol=0.02 * np.abs(expected).max())


def test_entries_without_a_gradient_so_far_neither_explode_nor_stay() -> None:
    """Columns have none until v is frozen, and a while after."""
    learning = 20

    def work(comm: Comm) -> tuple[float, float]:
        adam = cx.optimizers.OneBitAdam(RATE, freeze_after=learning)
        optimizer, weights = wrap(adam, comm), new_weights()[:1]
        before, furthest = weights[0].numpy()[:, ::4], 0.0
        for step in range(learning + 50):
            part = gradients(comm.rank, step)[0]
            if step < learning + 30:
                part[:, ::4] = 0
                furthest = max(furthest, np.abs(weights[0].numpy()[:, ::4] - before).max())
                then = weights[0].numpy()[:, ::4]
            optimizer.apply([tf.constant(part)], weights)
        learnt = np.abs(weights[0].numpy()[:, ::4] - then).mean()
        return furthest / RATE, learnt / RATE

    furthest, learnt = ThreadComm.run(Topology(2, 1), work)[0]
    assert furthest < 10
    assert learnt > 5


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden_by_the_bound(bad: float) -> None:
    adam, weights = cx.optimizers.OneBitAdam(RATE, freeze_after=1), new_weights()
    for value in (1.0, bad):
        adam.apply([tf.fill(weight.shape, value) for weight in weights], weights)
    assert not np.isfinite(weights[0].numpy()).any()


@pytest.mark.parametrize(
    ("scale_of", "rate_of", "frozen_at"),
    [
        (lambda step: 1.0, lambda step: RATE, 20),
        (lambda step: 1.0, lambda step: RATE * min(step / 35, 1), 50),
        (lambda step: 0.97**step, lambda step: RATE, 0),
        (lambda step: 1.03**step, lambda step: RATE, 0),
    ],
    ids=["steady", "while the rate rises", "falling", "growing"],
)
def test_second_moments_are_frozen_once_they_have_settled(
    scale_of: Callable[[int], float], rate_of: Callable[[int], float], frozen_at: int
) -> None:
    """With beta_2 = .9 they are compared every 10 updates."""
    optimizer = cx.optimizers.OneBitAdam(RATE, beta_2=0.9)
    weights = new_weights()
    optimizer.build(weights)
    step = tf.function(lambda *grads: optimizer.apply(list(grads), weights))
    for number in range(60):
        optimizer.learning_rate = rate_of(number)
        step(*(scale_of(number) * tf.ones(shape) for shape in SHAPES.values()))
    assert int(optimizer.frozen_at.numpy()) == frozen_at


def test_nothing_is_frozen_before_the_first_gradient() -> None:
    optimizer, weights = cx.optimizers.OneBitAdam(RATE, freeze_after=2), new_weights()
    for _ in range(3):
        optimizer.apply([tf.zeros(shape) for shape in SHAPES.values()], weights)
    assert int(optimizer.frozen_at.numpy()) == 0
    optimizer.apply([tf.ones(shape) for shape in SHAPES.values()], weights)
    assert int(optimizer.frozen_at.numpy()) == 4


def test_not_wrapped_it_freezes_alike_and_sends_nothing() -> None:
    optimizer, weights = cx.optimizers.OneBitAdam(RATE, freeze_after=2), new_weights()
    for step in range(2):
        optimizer.apply(list(map(tf.constant, gradients(0, step))), weights)
    mean, square = optimizer._momentums[0].numpy(), optimizer._velocities[0].numpy()
    before = weights[0].numpy()
    optimizer.apply(list(map(tf.constant, gradients(0, 2))), weights)
    mean = BETA_1 * mean + (1 - BETA_1) * gradients(0, 2)[0]
    np.testing.assert_array_equal(optimizer._velocities[0].numpy(), square)
    update = np.clip(mean / (1 - BETA_1**3) / (np.sqrt(square) + EPSILON), -1, 1)
    np.testing.assert_allclose(weights[0].numpy(), before - RATE * update, atol=1e-6)


def test_its_config_makes_an_equal_one() -> None:
    adam = cx.optimizers.OneBitAdam(
        0.1, 0.8, 0.9, 1e-6, 7, ["*embedding*"], 10, weight_decay=0.1, clipnorm=1.0
    )
    again = keras.optimizers.deserialize(keras.optimizers.serialize(adam))
    assert type(again) is cx.optimizers.OneBitAdam
    assert again.get_config() == adam.get_config()
    assert cx.optimizers.OneBitAdam.from_config(keras.optimizers.Adam(0.1).get_config())


def test_variables_that_stay_with_adam() -> None:
    adam = cx.optimizers.OneBitAdam(exclude=["*table"], dense_below=100)
    sizes = {"kernel": (10, 10), "small": (9, 11), "long": (1000,), "table": (100, 10)}
    sends = {
        name: adam.sends_momentum(keras.Variable(np.zeros(shape, "float32"), name=name))
        for name, shape in sizes.items()
    }
    assert sends == {"kernel": True, "small": False, "long": False, "table": False}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"exclude": "*bias"}, r"`exclude`.*\*bias"),
        ({"freeze_after": 0}, "freeze_after"),
        ({"dense_below": -1}, "dense_below"),
        ({"beta_2": 1.0}, "beta_2"),
    ],
)
def test_refused_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(cx.ConfigurationError, match=said):
        cx.optimizers.OneBitAdam(**options)


@pytest.mark.extended
def test_it_trains_as_adam_does_where_gradients_in_one_bit_do_not() -> None:
    adam = final_error(lambda: keras.optimizers.Adam(0.1), Scheme())
    momenta = final_error(lambda: cx.optimizers.OneBitAdam(0.1, freeze_after=50), ONE_BIT)
    behind = final_error(lambda: keras.optimizers.Adam(0.1), ONE_BIT)
    assert momenta < 1.25 * adam
    assert behind > 1.8 * adam


@pytest.mark.parametrize(("updates", "warned"), [(999, True), (1000, False), (None, False)])
def test_a_freeze_before_v_has_filled_its_average_is_warned_of(
    updates: int | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tfcommx"):
        cx.optimizers.OneBitAdam(freeze_after=updates).build(new_weights())
    assert ("999 updates, fewer than the 1000" in caplog.text) == warned
