"""A run that diverges keeps its last save with finite weights: `keep=1` replaced it by NaN."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

import tfcommx as cx


@pytest.fixture
def model() -> keras.Model:
    cx.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="last")])
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    return model


def fill(model: keras.Model, value: float) -> None:
    model.layers[0].kernel.assign(np.full((2, 2), value))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_replace_no_finite_ones(
    value: float, model: keras.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(model, 1.0)
    cx.checkpoint.save(model, tmp_path, 0)
    fill(model, value)
    for epoch in (1, 2):
        caplog.clear()
        cx.checkpoint.save(model, tmp_path, epoch)
        (record,) = caplog.records
        assert f"last/kernel after {epoch + 1} epochs" in record.message
    assert cx.checkpoint.restore(model, tmp_path) == 1
    assert np.all(model.layers[0].kernel.numpy() == 1)
    caplog.clear()
    cx.checkpoint.save(model, tmp_path, 1)
    assert cx.checkpoint.restore(model, tmp_path) == 2 and not caplog.records


def test_a_model_with_a_constant_of_infinity_is_saved(model: keras.Model, tmp_path: Path) -> None:
    """Weights of a mask, for instance, are infinite by intention, from the first save on."""
    fill(model, -np.inf)
    for epoch in range(3):
        cx.checkpoint.save(model, tmp_path, epoch)
        assert cx.checkpoint.restore(model, tmp_path) == epoch + 1
