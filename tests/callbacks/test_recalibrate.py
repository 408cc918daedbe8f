"""Batch norm's statistics, measured again after a training."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

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


def test_a_layer_that_is_called_twice_averages_over_both_calls() -> None:
    """The first call of each batch counted less than the second."""
    batches = np.random.default_rng(4).normal(3, 2, (3, 16, 4)).astype("float32")
    norm = keras.layers.BatchNormalization()

    class Net(keras.Model):
        def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
            # The call in inference does not update the statistics
            return norm(inputs) + norm(3 * inputs + 1) + norm(inputs, training=False)

    net = Net()
    net.norm = norm
    net(batches[0])
    again = cx.callbacks.RecalibrateBatchNorm(batches)
    again.set_model(net)
    again.on_train_end()
    inputs = [part for batch in batches for part in (batch, 3 * batch + 1)]
    means = np.mean([part.mean(axis=0) for part in inputs], axis=0)
    variances = np.mean([part.var(axis=0) for part in inputs], axis=0)
    np.testing.assert_allclose(norm.moving_mean, means, rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, variances, rtol=1e-5)
    assert norm.momentum == 0.99 and "call" not in vars(norm)


def test_data_that_is_exhausted_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    norm = keras.layers.BatchNormalization()
    net = keras.Sequential([keras.layers.Input((4,)), norm])
    again = cx.callbacks.RecalibrateBatchNorm(iter([np.ones((8, 4))]))
    again.set_model(net)
    for warnings in (0, 1):
        again.on_train_end()
        assert len(caplog.records) == warnings
    np.testing.assert_array_equal(norm.moving_mean, np.ones(4))


def test_no_batches_are_refused() -> None:
    with pytest.raises(cx.ConfigurationError, match="`batches`"):
        cx.callbacks.RecalibrateBatchNorm([], batches=0)
