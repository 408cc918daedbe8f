"""Batch norm's statistics, measured again after a training."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfcommx as cx


def test_statistics_become_the_average_over_the_batches() -> None:
    numbers = np.random.default_rng(2)
    batches = [(numbers.normal(3, 2, (16, 4)).astype("float32"), 0) for _ in range(5)]
    norm = keras.layers.BatchNormalization(momentum=0.9)
    net = keras.Sequential([keras.layers.Input((4,)), norm, keras.layers.Dense(1)])
    net.compile("sgd", loss="mse", jit_compile=False)
    again = cx.callbacks.RecalibrateBatchNorm(batches, batches=4)
    net.fit(np.zeros((8, 4)), np.zeros((8, 1)), epochs=2, verbose=0, callbacks=[again])
    means = [x.mean(axis=0) for x, _ in batches[:4]]
    variances = [x.var(axis=0) for x, _ in batches[:4]]
    np.testing.assert_allclose(norm.moving_mean, np.mean(means, axis=0), rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, np.mean(variances, axis=0), rtol=1e-5)
    assert norm.momentum == 0.9


def test_ranks_with_other_seeds_measure_the_same_and_change_nothing_else() -> None:
    """Each rank's dropout drew from its own seeds, so that the models differed unnoticed."""
    data = np.random.default_rng(3).normal(size=(2, 16, 4)).astype("float32")

    def measured(seed: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(seed)
        hidden = keras.layers.SpectralNormalization(keras.layers.Dense(3))
        parts = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization(), hidden]
        net = keras.Sequential([keras.layers.Input((4,)), *parts])
        for number, weight in enumerate(net.weights):
            weight.assign(0.1 * number + np.arange(np.prod(weight.shape)).reshape(weight.shape))
        norm, before = parts[1], [variable.numpy() for variable in net.variables]
        again = cx.callbacks.RecalibrateBatchNorm(data)
        again.set_model(net)
        again.on_train_end()
        for variable, value in zip(net.variables, before, strict=True):
            moves = variable is norm.moving_mean or variable is norm.moving_variance
            assert np.array_equal(variable.numpy(), value) != moves, variable.path
        return [norm.moving_mean.numpy(), norm.moving_variance.numpy()]

    for one, other in zip(measured(1), measured(2), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_batches_are_refused() -> None:
    with pytest.raises(cx.ConfigurationError, match="`batches`"):
        cx.callbacks.RecalibrateBatchNorm([], batches=0)
