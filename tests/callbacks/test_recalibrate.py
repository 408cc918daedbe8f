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


def test_no_batches_are_refused() -> None:
    with pytest.raises(cx.ConfigurationError, match="`batches`"):
        cx.callbacks.RecalibrateBatchNorm([], batches=0)
