"""A checkpoint that is restored into a model with another optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfcommx as cx
from tfcommx.core import CheckpointError


def trained(name: str, strategy: str = "synchronous", **options: Any) -> keras.Model:
    cx.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="out")], name="net")
    optimizer = getattr(keras.optimizers, name)(0.1, **options)
    wrapped = cx.DistributedOptimizer(optimizer, strategy=strategy)
    model.compile(wrapped, loss="mse", jit_compile=False)
    model.fit(np.ones((4, 4)), np.zeros((4, 3)), verbose=0)
    return model


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("RMSprop", "synchronous"), ("Adam", "synchronous"), ("Adam", "sharded")],
)
def test_the_state_of_another_optimizer_is_refused(
    name: str, strategy: str, tmp_path: Path
) -> None:
    """RMSprop took SGD's momenta for mean squares; with "sharded" the state began anew."""
    cx.checkpoint.save(trained("SGD", momentum=0.9), tmp_path, 0)
    with pytest.raises(CheckpointError, match=f"{name}.* SGD"):
        cx.checkpoint.restore(trained(name, strategy), tmp_path)


def test_the_state_of_a_base_or_a_subclass_is_restored(tmp_path: Path) -> None:
    model = trained("AdamW")
    cx.checkpoint.save(model, tmp_path, 0)
    again = trained("Adam")
    cx.checkpoint.restore(again, tmp_path)
    for saved, loaded in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), loaded.numpy())
