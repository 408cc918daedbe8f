"""OneBitLAMB against NumPy and LAMB, and training where gradients in 1 bit fail."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sent_momenta import MomentumInOneBit, final_error, gradients, new_weights, wrap

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology

RATE, BETA_1, BETA_2, EPSILON, DECAY = 0.01, 0.9, 0.99, 1e-7, 0.1


def lamb_step(weight: np.ndarray, update: np.ndarray, inside: bool) -> np.ndarray:
    """Return a weight after a step of LAMB by Adam's update."""
    if inside:
        update = update + DECAY * weight
    else:
        weight = weight * (1 - RATE * DECAY)
    return weight - RATE * np.linalg.norm(weight) / np.linalg.norm(update) * update


@pytest.mark.parametrize("inside", [True, False])
def test_it_follows_its_definition(inside: bool) -> None:
    """The first phase is LAMB, but for the rounding of gradients to bfloat16."""
    ranks, learning, steps = 2, 4, 8
    options: dict[str, Any] = {"weight_decay": DECAY, "decay_in_ratio": inside}

    def work(comm: Comm) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        lamb = cx.optimizers.OneBitLAMB(
            RATE,
            beta_1=BETA_1,
            beta_2=BETA_2,
            epsilon=EPSILON,
            freeze_after=learning,
            **options,
        )
        optimizer, weights = wrap(lamb, comm), new_weights()
        states = []
        for step in range(steps):
            optimizer.apply(list(map(tf.constant, gradients(comm.rank, step))), weights)
            moments = optimizer._momentums[0], optimizer._velocities[0]
            states.append([variable.numpy() for variable in (*weights, *moments)])
            if step == learning - 1:
                residuals = optimizer.exchanger.export().residuals.values()
        assert int(optimizer.frozen_at.numpy()) == learning
        return states[learning - 1], states[-1], max(residuals, key=np.size)

    (then, now, first), (_, other, second) = ThreadComm.run(Topology(ranks, 1), work)
    for result, expected in zip(now, other, strict=True):
        np.testing.assert_array_equal(result, expected)
    plain, weights = cx.optimizers.LAMB(RATE, BETA_1, BETA_2, EPSILON, **options), new_weights()
    for step in range(steps):
        parts = zip(*(gradients(rank, step) for rank in range(ranks)), strict=True)
        plain.apply([tf.constant(sum(part) / ranks) for part in parts], weights)
        if step == learning - 1:
            np.testing.assert_allclose(then[0], weights[0].numpy(), atol=5e-4)
    np.testing.assert_allclose(now[1], weights[1].numpy(), atol=2e-3)
    weight, mean, square = (then[position].ravel() for position in (0, 2, 3))
    momentum = MomentumInOneBit(np.stack([first, second]), mean, BETA_1)
    for step in range(learning, steps):
        momentum.step([gradients(rank, step)[0] for rank in range(ranks)])
        update = momentum.mean / (1 - BETA_1 ** (step + 1)) / (np.sqrt(square) + EPSILON)
        weight = lamb_step(weight, np.clip(update, -1, 1), inside)
    np.testing.assert_allclose(now[0].ravel(), weight, atol=1e-5)


def test_not_wrapped_it_is_lamb_until_the_freeze() -> None:
    one_bit, lamb = cx.optimizers.OneBitLAMB(RATE, freeze_after=2), cx.optimizers.LAMB(RATE)
    weights, expected = new_weights(), new_weights()
    for step in range(3):
        parts = list(map(tf.constant, gradients(0, step)))
        one_bit.apply(parts, weights)
        if step < 2:
            lamb.apply(parts, expected)
            before, square = weights[0].numpy(), one_bit._velocities[0].numpy()
            np.testing.assert_array_equal(before, expected[0].numpy())
    np.testing.assert_array_equal(one_bit._velocities[0].numpy(), square)
    update = one_bit._momentums[0].numpy() / (1 - BETA_1**3) / (np.sqrt(square) + EPSILON)
    update = np.clip(update, -1, 1)
    step = RATE * np.linalg.norm(before) / np.linalg.norm(update) * update
    np.testing.assert_allclose(weights[0].numpy(), before - step, atol=1e-6)


# Its definition is tested above, and the training of its base class with OneBitAdam
@pytest.mark.exhaustive
def test_it_trains_as_lamb_does_where_gradients_in_one_bit_do_not() -> None:
    wire = Scheme("asa", wire="int1")
    lamb = final_error(lambda: cx.optimizers.LAMB(0.1), Scheme())
    momenta = final_error(lambda: cx.optimizers.OneBitLAMB(0.1, freeze_after=50), wire)
    behind = final_error(lambda: cx.optimizers.LAMB(0.1), wire)
    assert momenta < 1.25 * lamb
    assert behind > 8 * lamb


def test_its_config_makes_an_equal_one() -> None:
    lamb = cx.optimizers.OneBitLAMB(
        0.1, beta_1=0.8, weight_decay=0.1, norms="auto", freeze_after=7, learning_wire="int4"
    )
    again = keras.optimizers.deserialize(keras.optimizers.serialize(lamb))
    assert type(again) is cx.optimizers.OneBitLAMB
    assert again.get_config() == lamb.get_config()


@pytest.mark.parametrize("options", [{"freeze_after": 0}, {"learning_wire": "int2"}])
def test_refused_options(options: dict[str, Any]) -> None:
    with pytest.raises(cx.ConfigurationError, match=next(iter(options))):
        cx.optimizers.OneBitLAMB(**options)
