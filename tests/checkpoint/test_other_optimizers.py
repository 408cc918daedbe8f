"""A checkpoint that is restored into a model with another optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfcommx as cx
from tfcommx.core import CheckpointError


def compiled(
    name: str, strategy: str = "synchronous", learning_rate: Any = 0.1, **options: Any
) -> keras.Model:
    cx.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="out")], name="net")
    optimizer = getattr(keras.optimizers, name)(learning_rate, **options)
    if strategy == "scaled":
        optimizer, strategy = keras.optimizers.LossScaleOptimizer(optimizer), "synchronous"
    wrapped = cx.DistributedOptimizer(optimizer, strategy=strategy)
    model.compile(wrapped, loss="mse", jit_compile=False)
    wrapped.build(model.trainable_variables)
    return model


def trained(name: str, strategy: str = "synchronous", **options: Any) -> keras.Model:
    model = compiled(name, strategy, **options)
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


@pytest.mark.parametrize(
    ("name", "strategy", "saved", "options"),
    [
        ("SGD", "sharded", {"momentum": 0.9}, {}),
        ("SGD", "sharded", {}, {"gradient_accumulation_steps": 2}),
        ("SGD", "synchronous", {"momentum": 0.9}, {"use_ema": True}),
        ("RMSprop", "synchronous", {"momentum": 0.9}, {"centered": True}),
    ],
)
def test_other_state_of_the_same_optimizer_is_refused(
    name: str, strategy: str, saved: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """With "sharded" the state began anew; as many variables were taken for others.

    Moving averages of the weights were then momenta, and mean gradients of RMSprop, too.
    """
    cx.checkpoint.save(compiled(name, strategy, **saved), tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"\bmomentum\b.*\buse_ema\b"):
        cx.checkpoint.restore(compiled(name, strategy, **options), tmp_path)


def test_the_state_of_a_base_or_a_subclass_is_restored(tmp_path: Path) -> None:
    model = trained("AdamW")
    cx.checkpoint.save(model, tmp_path, 0)
    again = trained("Adam")
    cx.checkpoint.restore(again, tmp_path)
    for saved, loaded in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), loaded.numpy())


@pytest.mark.parametrize(
    ("decays", "strategy"), [(False, "scaled"), (True, "synchronous"), (True, "sharded")]
)
def test_a_schedule_and_a_fixed_rate_replace_each_other(
    decays: bool, strategy: str, tmp_path: Path
) -> None:
    """It was refused, so no run could continue with its momenta under another kind of rate."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    rates = [schedule, 0.05] if decays else [0.05, schedule]
    model = compiled("Adam", strategy, rates[0])
    steps = 3
    for _ in range(steps):
        model.optimizer.apply([np.ones(weight.shape) for weight in model.weights], model.weights)
    cx.checkpoint.save(model, tmp_path, 0)
    again = compiled("Adam", strategy, rates[1])
    listed = [variable.path for variable in again.optimizer.variables]
    cx.checkpoint.restore(again, tmp_path)
    assert [variable.path for variable in again.optimizer.variables] == listed
    inner = [getattr(net.optimizer, "inner_optimizer", net.optimizer) for net in (model, again)]
    one, other = ({var.name: var.numpy() for var in optimizer.variables} for optimizer in inner)
    assert one.keys() ^ other.keys() == {"learning_rate"}
    assert one["iteration"] == other["iteration"] == steps
    for name in one.keys() & other.keys():
        np.testing.assert_array_equal(one[name], other[name], name)
    now = schedule(steps) if not decays else 0.05
    np.testing.assert_allclose(again.optimizer.learning_rate, now)
    again.optimizer.apply([np.ones(weight.shape) for weight in again.weights], again.weights)


def test_the_state_of_shards_is_restored_without_shards(tmp_path: Path) -> None:
    """It was compared with the shards of rank 0, and refused as another optimizer's."""
    model = compiled("Adam", "sharded")
    model.optimizer.apply([np.ones(weight.shape) for weight in model.weights], model.weights)
    cx.checkpoint.save(model, tmp_path, 0)
    again = compiled("Adam")
    cx.checkpoint.restore(again, tmp_path)
    whole = model.optimizer.whole_values()
    for saved, loaded in zip(whole, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved, loaded.numpy())
