"""Callbacks where ranks are unlike each other: unbuilt models, a rank that stops, validates or begins alone, odd metrics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_optimizer import SPARSE, weights

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.comm import Comm


class Subclassed(keras.Model):
    def __init__(self, middle: keras.layers.Layer | None = None) -> None:
        super().__init__()
        self.middle, self.out = middle or keras.layers.Dense(8), keras.layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.out(self.middle(x))


def built_backbone() -> keras.Model:
    return Subclassed(keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(8)]))


def unbuilt() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(3)])


def data(rows: int = 32) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(7)
    return numbers.normal(size=(rows, 12)).astype("float32"), numbers.normal(size=(rows, 3)).astype("float32")


def small(**options: Any) -> keras.Model:
    net = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(3)])
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), **{"loss": "mse", "jit_compile": False, **options})
    return net


@pytest.mark.parametrize(("make", "options", "rows"), [
    (Subclassed, {}, 32), (built_backbone, {}, 32), (unbuilt, {"steps_per_execution": 2}, 32), (unbuilt, {}, 8),
    (unbuilt, {"run_eagerly": True}, 16),
], ids=["subclassed", "backbone", "two steps a call", "one call an epoch", "eagerly"])
def test_models_that_are_built_by_the_first_step(comm: Comm, make: Any, options: dict[str, Any], rows: int) -> None:
    keras.utils.set_random_seed(comm.rank)
    net = make()
    net.compile(cx.DistributedOptimizer(keras.optimizers.Adam(0.01), SPARSE), loss="mse", jit_compile=False, **options)
    x, y = data(rows)
    for _ in range(2):  # the second time all is built
        net.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[callbacks.BroadcastState(), callbacks.CompareReplicas()])
    state = [variable.numpy().tobytes() for variable in (*net.variables, *net.optimizer.variables) if "loss" not in variable.path]
    assert len(net.optimizer.variables) > 8 and comm.gather_objects(state) == [state] * comm.topology.size


def test_a_model_that_one_rank_alone_has_built(comm: Comm) -> None:
    net = unbuilt()
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse", jit_compile=False)
    if comm.rank == 0:
        net.build((None, 12))
    before = comm.gather_objects(weights(net) if comm.rank == 0 else None)[0]
    net.fit(*data(), batch_size=8, verbose=0, callbacks=[callbacks.BroadcastState()])
    for mine, roots in zip(weights(net), before, strict=True):
        np.testing.assert_array_equal(mine, roots)


def test_ranks_that_begin_or_end_at_unequal_epochs_are_told(comm: Comm) -> None:
    if comm.topology.size == 1:
        return
    unequal = [(3 - comm.rank, 0, r"until the same epoch.*\[3, 2"), (3, min(comm.rank, 1), r"begin at the same epoch.*\[0, 1"),
               (3, 0 if comm.rank else 3, r"begin at the same epoch.*\[None, 0")]
    for epochs, first, said in unequal:
        with pytest.raises(cx.PlanError, match=said):
            small().fit(*data(8), epochs=epochs, initial_epoch=first, verbose=0, callbacks=[callbacks.BroadcastState()])


@pytest.mark.parametrize(("every", "steps"), [(1, 2), (3, 3), (9, 4)])
def test_all_ranks_stop_at_the_same_step(comm: Comm, every: int, steps: int) -> None:
    """The last rank meets a NaN in its second step. With every=9 the epoch's end, after 4 steps, comes first."""
    last, net, seen = comm.rank == comm.topology.size - 1, small(), []

    class Alone(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if last and batch == 1:
                self.model.stop_training = True

    net.fit(*data(), batch_size=8, epochs=3, verbose=0, callbacks=[callbacks.BroadcastState(), Alone(), callbacks.AgreeOnStop(every)])
    assert seen == list(range(steps)) and net.stop_training


def test_keras_callbacks_that_stop_one_rank(comm: Comm) -> None:
    last = comm.rank == comm.topology.size - 1
    x, y = data()
    bad = np.where(last & (np.arange(32)[:, None] == 20), np.nan, x)
    net = small()
    net.fit(bad, y, batch_size=8, epochs=2, shuffle=False, verbose=0,
            callbacks=[callbacks.BroadcastState(), keras.callbacks.TerminateOnNaN(), callbacks.AgreeOnStop()])
    assert int(net.optimizer.iterations) == 3  # the loss of the last rank alone was NaN
    net = small()
    early = [keras.callbacks.EarlyStopping("loss", mode="max", patience=0)] if last else []  # of a loss that falls
    net.fit(x, y, batch_size=8, epochs=9, verbose=0, callbacks=[callbacks.BroadcastState(), *early, callbacks.AgreeOnStop()])
    assert len(net.history.history["loss"]) == 2
    with pytest.raises(cx.PlanError, match="every"):
        callbacks.AgreeOnStop(0)


def test_metrics_of_several_numbers(comm: Comm) -> None:
    logs = {"loss": float(comm.rank), "f1": np.float32([comm.rank, 1]), "note": "text"}
    callbacks.AverageMetrics().on_epoch_end(0, logs)
    middle = (comm.topology.size - 1) / 2
    assert logs.pop("f1").tolist() == [middle, 1] and logs == {"loss": middle, "note": "text"}
    net = small(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    history = net.fit(data()[0], np.eye(3)[np.arange(32) % 3], verbose=0, callbacks=[callbacks.AverageMetrics()]).history
    assert np.shape(history["f1_score"]) == (1, 3)
