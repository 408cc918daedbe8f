"""StepAhead in `fit` and in loops: evaluation, checkpoints, averages, several steps at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import (
    SaveTheEpoch,
    batch,
    compiled,
    fit,
    same_on_all_ranks,
    take_step,
    weights,
)

import tfcommx as cx
from tfcommx.collectives.comm import Comm

CODED = cx.Scheme("hitopk", "mstopk", 0.2, "torus", 8, wire="elias/int4", dense_wire="float16")
EXACT = cx.Scheme("hitopk", "exact", 0.2, dense_below=0)


def new(
    optimizer: keras.optimizers.Optimizer,
    scheme: cx.Scheme,
    strategy: str = "step_ahead",
    **options: Any,
) -> keras.Model:
    return compiled(cx.DistributedOptimizer(optimizer, scheme, strategy=strategy), **options)


class Watch(keras.callbacks.Callback):
    """Notes at each batch whether the ranks have the same weights."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm, self.trained, self.tested = comm, [], []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.trained.append(same_on_all_ranks(self.comm, self.model))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.tested.append(same_on_all_ranks(self.comm, self.model))


@pytest.mark.extended
@pytest.mark.parametrize("steps_per_execution", [1, case(2, kept=False)])
def test_fit_evaluates_the_agreed_weights(comm: Comm, steps_per_execution: int) -> None:
    """Nodes differ within an epoch, and never while they are evaluated."""
    net = new(keras.optimizers.Adam(0.01), CODED, steps_per_execution=steps_per_execution)
    watch, (x, y) = Watch(comm), batch(comm.rank, rows=32)
    net.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        verbose=0,
        shuffle=False,
        validation_data=(x, y),
        callbacks=[cx.callbacks.BroadcastState(), cx.callbacks.AverageBatchNorm(), watch],
    )
    one_node = comm.topology.nodes == 1
    assert watch.trained == [True, *[one_node] * (4 // steps_per_execution - 1)] * 2
    assert watch.tested and all(watch.tested) and same_on_all_ranks(comm, net)


@pytest.mark.exhaustive  # test_step_ahead.py on threads
@pytest.mark.parametrize("scheme", [CODED, EXACT], ids=["coded", "exact"])
def test_a_resumed_run_is_the_one_that_was_not_interrupted(
    comm: Comm, folder: Path, scheme: cx.Scheme
) -> None:
    whole, second = (new(keras.optimizers.SGD(0.1), scheme) for _ in range(2))
    fit(whole, comm, epochs=2, extra=(SaveTheEpoch(folder),))
    assert same_on_all_ranks(comm, whole)
    assert cx.checkpoint.restore(second, folder) == 1
    fit(second, comm, epochs=2, initial_epoch=1)
    for mine, expected in zip(weights(second), weights(whole), strict=True):
        np.testing.assert_array_equal(mine, expected)
    residuals = [net.optimizer.exchanger.export().residuals for net in (whole, second)]
    assert residuals[0] and residuals[0].keys() == residuals[1].keys()
    for path, residual in residuals[0].items():
        np.testing.assert_array_equal(residuals[1][path], residual)


@pytest.mark.parametrize(
    ("before", "after"), [("step_ahead", "synchronous"), ("synchronous", "step_ahead")]
)
def test_a_checkpoint_s_residuals_of_updates_do_not_become_gradients(
    comm: Comm, folder: Path, caplog: pytest.LogCaptureFixture, before: str, after: str
) -> None:
    saved = new(keras.optimizers.SGD(0.1), EXACT, strategy=before)
    take_step(saved, comm)
    cx.consolidate(saved.optimizer)
    cx.checkpoint.save(saved, folder, 0)
    other = new(keras.optimizers.SGD(0.1), EXACT, strategy=after)
    assert saved.optimizer.exchanger.export().residuals
    assert cx.checkpoint.restore(other, folder) == 1
    assert not other.optimizer.exchanger.export().residuals
    assert "dropped" in caplog.text


class Linear(keras.layers.Layer):
    """Whose gradients are its inputs, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(9, 2), initializer="zeros", name="kernel")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ self.kernel


def linear(comm: Comm, **options: Any) -> tuple[keras.Model, np.ndarray]:
    """Return a network whose updates are its inputs, and inputs for 8 steps of 2 rows."""
    net = keras.Sequential([keras.layers.Input((9,)), Linear()])
    plain = keras.optimizers.SGD(0.5, **options)
    net.compile(
        cx.DistributedOptimizer(plain, EXACT, strategy="step_ahead"),
        loss=lambda _, found: tf.reduce_sum(found) / 2,
        jit_compile=False,
        steps_per_execution=2,
    )
    return net, np.random.default_rng([7, comm.rank]).normal(size=(16, 9)).astype("float32")


def check_all_updates(net: keras.Model, comm: Comm, inputs: np.ndarray, sums: float) -> None:
    """Compare weights plus residuals with `sums` times the mean of all ranks' inputs."""
    cx.consolidate(net.optimizer)
    assert same_on_all_ranks(comm, net)
    (kept,) = net.optimizer.exchanger.export().residuals.values()
    assert np.abs(kept).max() > 1e-3
    unsent = np.mean(comm.gather_objects(kept), axis=0).reshape(9, 2)
    seen = np.mean(comm.gather_objects(inputs), axis=0).mean(axis=0)
    expected = np.repeat(-0.5 * sums * seen[:, None], 2, axis=1)
    np.testing.assert_allclose(weights(net)[0] + unsent, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("accumulates", [case(None, kept=False), 2])
def test_several_steps_at_a_time_lose_no_update(comm: Comm, accumulates: int | None) -> None:
    """The last call of an iterator, which has no data, is no step."""
    net, inputs = linear(comm, gradient_accumulation_steps=accumulates)
    options = {"batch_size": 2, "epochs": 2, "verbose": 0, "shuffle": False}
    net.fit(inputs, inputs[:, 0], callbacks=[cx.callbacks.BroadcastState()], **options)
    check_all_updates(net, comm, inputs, 8 * 2 / (accumulates or 1))


def test_a_loop_of_ones_own_may_consolidate_between_steps(comm: Comm) -> None:
    net, inputs = linear(comm)
    variables = net.trainable_variables

    @tf.function
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(rows)) / 2
        net.optimizer.apply(tape.gradient(loss, variables), variables)

    for place in range(8):
        step(tf.constant(inputs[2 * place : 2 * place + 2]))
        if place % 3 == 1:
            cx.consolidate(net.optimizer)
            assert same_on_all_ranks(comm, net)
    check_all_updates(net, comm, inputs, 8)


def test_moving_averages_become_equal(comm: Comm) -> None:
    averaged = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    net = new(averaged, EXACT)
    fit(net, comm)
    assert same_on_all_ranks(comm, net)
    for mine, average in zip(
        weights(net), net.optimizer._model_variables_moving_average, strict=True
    ):
        np.testing.assert_array_equal(mine, average.numpy())
    with pytest.raises(cx.ConfigurationError, match=r"StepAhead.*ema_overwrite_frequency=3"):
        new(keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3), EXACT)
