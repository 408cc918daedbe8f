"""Optimizers that a model holds elsewhere than in an attribute were never averaged.

A GAN with `self.optimizers = {"g": ..., "d": ...}` trained with other weights on each rank under
weight averaging, without a word; nor was their state broadcast, or saved with its residuals.
keras-io#729.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.optim.wrapped import (
    _MOST_PARTS,
    _look_into,
    exchanger_in,
    optimizers_in,
    trains_alone,
)

WIDTH = 4


@dataclass(slots=True)
class Slotted:
    optimizer: keras.optimizers.Optimizer


class Trainer:
    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.by_part = {"part": [optimizer]}


class Relay(keras.optimizers.SGD):
    """An optimizer of the user's that holds the one which takes the steps."""

    def __init__(self, inner: keras.optimizers.Optimizer) -> None:
        super().__init__(0.1)
        self.held = inner

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.held.apply(grads, trainable_variables)


class Block(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.own: keras.optimizers.Optimizer | None = None


# Name of a part -> puts its optimizer somewhere into the model
HOLDERS: dict[str, Callable[[keras.Model, keras.optimizers.Optimizer], None]] = {
    "attribute": lambda net, one: setattr(net, "second", one),
    "dict": lambda net, one: setattr(net, "by_name", {"other": one}),
    "list": lambda net, one: setattr(net, "listed", [None, one]),
    "tuple": lambda net, one: setattr(net, "pair", ("name", one)),
    "nested": lambda net, one: setattr(net, "nested", {"all": [{"deep": (one,)}]}),
    "ordered": lambda net, one: setattr(net, "ordered", OrderedDict(one=one)),
    "set": lambda net, one: setattr(net, "some", {one}),
    "deque": lambda net, one: setattr(net, "queue", deque([one])),
    "namespace": lambda net, one: setattr(net, "space", SimpleNamespace(g=one)),
    "slots": lambda net, one: setattr(net, "slotted", Slotted(one)),
    "object": lambda net, one: setattr(net, "trainer", Trainer(one)),
    "optimizer": lambda net, one: setattr(net, "relay", Relay(one)),
    "layer": lambda net, one: setattr(net.block, "own", one),
    "sub_model": lambda net, one: net.inner.compile(one, jit_compile=False),
    "loss_scale": lambda net, one: setattr(
        net, "scaled", {"it": keras.optimizers.LossScaleOptimizer(one, initial_scale=8.0)}
    ),
}


class Parts(keras.Model):
    """A layer for each holder, which its optimizer alone trains, and one for that of `compile`."""

    def __init__(self, make: Callable[[], keras.optimizers.Optimizer], names: list[str]) -> None:
        super().__init__()
        self.block, self.inner = Block(), keras.Sequential([keras.layers.Dense(1)])
        self.inner.build((None, 1))
        self.parts = {name: keras.layers.Dense(WIDTH, name=name) for name in ["compiled", *names]}
        for layer in self.parts.values():
            layer.build((None, WIDTH))
        optimizers = {name: make() for name in ["compiled", *names]}
        for name in names:
            HOLDERS[name](self, optimizers[name])
        if "loss_scale" in names:
            optimizers["loss_scale"] = self.scaled["it"]
        for name, layer in self.parts.items():  # Or the first step would be traced twice
            optimizers[name].build(layer.trainable_variables)
        self.take = lambda: optimizers  # None is found through a function
        self.compile(optimizers["compiled"], jit_compile=False)

    def get_config(self) -> dict[str, Any]:
        return {"names": list(self.parts)}

    def train_step(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        for name, layer in self.parts.items():
            optimizer = self.take()[name]
            variables = layer.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(x) - x) ** 2)
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


@pytest.fixture(autouse=True)
def _two_ranks(comm: Comm) -> None:
    if comm.topology.size != 2:
        pytest.skip("the test compares the weights of two ranks")
    keras.utils.clear_session()  # Other tests made models on one rank alone: layers have numbers


def data() -> np.ndarray:
    numbers = np.random.default_rng(cx.rank())
    return numbers.normal(cx.rank(), 1, (32, WIDTH)).astype("float32")


def fit(net: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 2) -> None:
    first = [cx.callbacks.BroadcastState()]
    net.fit(data(), batch_size=8, epochs=epochs, verbose=0, callbacks=[*first, *callbacks])


def state_of(net: Parts) -> dict[str, list[np.ndarray]]:
    return {
        name: [one.numpy() for one in (*layer.variables, *net.take()[name].variables)]
        for name, layer in net.parts.items()
    }


def require_equal_ranks(comm: Comm, net: Parts, only_weights: bool = False) -> None:
    here = state_of(net)
    everyone = comm.gather_objects(here)
    for name, own in here.items():
        parts = (rank[name][: 2 if only_weights else None] for rank in everyone)
        for one, other in zip(*parts, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
        assert len(own) > 2


def averaged() -> keras.optimizers.Optimizer:
    return cx.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9),
        strategy=cx.strategies.WeightAveraging(every=1000),
    )


def sparse() -> keras.optimizers.Optimizer:
    return cx.DistributedOptimizer(
        keras.optimizers.Adam(0.05), cx.Scheme("allgather", "mstopk", 0.25, dense_below=8)
    )


@pytest.mark.extended
def test_weights_are_averaged_wherever_the_optimizer_is(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """All are found; some are trained, because a step of each takes long to trace."""
    net = Parts(averaged, list(HOLDERS))
    wrapped = {id(optimizer) for optimizer in net.take().values()}
    assert {id(optimizer) for optimizer in optimizers_in(net)} == wrapped
    assert len(wrapped) == len(HOLDERS) + 1
    keras.utils.set_random_seed(comm.rank)
    net = Parts(averaged, ["nested", "loss_scale"])
    fit(net)
    require_equal_ranks(comm, net, only_weights=True)
    assert not [line for line in caplog.messages if "does not hold it" in line], caplog.text


@pytest.mark.extended
def test_states_start_equal_and_are_restored_with_residuals(comm: Comm, folder: Path) -> None:
    keras.utils.set_random_seed(comm.rank)
    names = ["object", "loss_scale"]  # The test above finds those of all holders
    net = Parts(sparse, names)
    for optimizer in net.take().values():
        for variable in optimizer.variables:
            if "momentum" in variable.path:
                variable.assign(tf.fill(variable.shape, comm.rank + 0.5))
    fit(net)
    require_equal_ranks(comm, net)
    cx.checkpoint.save(net, folder, 1)
    keras.utils.set_random_seed(100 + comm.rank)
    again = Parts(sparse, names)
    again.build((None, WIDTH))
    assert cx.checkpoint.restore(again, folder) == 2
    fit(again, epochs=0)
    wanted, got = state_of(net), state_of(again)
    for name, values in wanted.items():
        for one, other in zip(values, got[name], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
    sent = 0.0
    for one, other in zip(optimizers_in(net), optimizers_in(again), strict=True):
        wanted, got = (exchanger_in(each).export().residuals for each in (one, other))
        for left, right in zip(wanted.values(), got.values(), strict=True):
            np.testing.assert_array_equal(left, right)
            sent += np.abs(left).sum()
    assert sent > 0


@pytest.mark.extended
def test_an_optimizer_that_is_made_between_epochs_is_averaged(comm: Comm) -> None:
    keras.utils.set_random_seed(comm.rank)
    net = Parts(averaged, ["dict"])

    def replace(epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            net.by_name["late"] = late = averaged()
            optimizers = {**net.take(), "dict": late}
            net.take = lambda: optimizers
            net.make_train_function(force=True)

    fit(net, keras.callbacks.LambdaCallback(on_epoch_begin=replace))
    require_equal_ranks(comm, net, only_weights=True)


@pytest.mark.extended
def test_an_optimizer_that_the_model_does_not_hold_is_named(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    net = Parts(averaged, ["dict"])
    net.by_name.clear()
    for _ in range(2):
        caplog.clear()
        fit(net)
        (line,) = [line for line in caplog.messages if "does not hold it" in line]
        assert f"Rank {comm.rank}: the wrapped optimizer 'sgd" in line, line
    caplog.clear()
    net.compile(averaged(), jit_compile=False)  # The one before trains no more
    net.parts, optimizer = {"compiled": net.parts["compiled"]}, net.optimizer
    net.take = lambda: {"compiled": optimizer}
    fit(net)
    assert not caplog.messages


@pytest.mark.exhaustive  # test_unwrapped.py has 19 cases
def test_a_plain_optimizer_among_wrapped_ones_is_named(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    net = Parts(averaged, ["dict"])
    plain = keras.optimizers.SGD(0.05, name="forgotten")
    net.by_name["other"] = plain
    optimizers = {**net.take(), "dict": plain}
    net.take = lambda: optimizers
    fit(net)
    time.sleep(1.5)  # A thread looks
    assert [line for line in caplog.messages if "'forgotten' is not wrapped" in line], caplog.text


@pytest.mark.extended
def test_loss_scales_agree(comm: Comm) -> None:
    net = Parts(averaged, ["loss_scale"])
    x = data()
    x[8:16] = np.inf if comm.rank else x[8:16]
    net.fit(x, batch_size=8, verbose=0, shuffle=False, callbacks=[cx.callbacks.BroadcastState()])
    steps = [int(net.scaled["it"].inner_optimizer.iterations)]
    assert comm.gather_objects(steps) == [[3], [3]]


@pytest.mark.exhaustive
def test_callbacks_set_rates_and_schemes_of_several_optimizers(comm: Comm) -> None:
    net = Parts(sparse, ["dict"])
    with pytest.raises(
        cx.ConfigurationError, match=r"WarmUp\b.*'adam\w*', 'adam\w*'"
    ) as refused:  # It would choose one by itself
        fit(net, cx.callbacks.WarmUp(0.1, 4))
    assert "'adam" in str(refused.value)
    other = net.by_name["other"]
    fit(net, cx.callbacks.WarmUp(0.1, 4, optimizer=other), epochs=1)
    np.testing.assert_allclose(float(other.learning_rate), 0.1 * (0.5 + 0.5 * 3 / 4), rtol=1e-6)
    assert float(net.optimizer.learning_rate) == np.float32(0.05)
    fit(net, cx.callbacks.SwitchScheme({0: cx.Scheme()}), epochs=1)
    for optimizer in (net.optimizer, other):
        (run,) = exchanger_in(optimizer).runs.values()
        assert {bucket.route for bucket in run.executor.plan.buckets} == {"allreduce"}


class Words(set[str]):
    """A tokenizer's vocabulary, as the user's object holds it."""

    def __iter__(self) -> Any:
        raise AssertionError("a search that sorts the words takes seconds")


def test_a_large_set_is_data(comm: Comm) -> None:
    """A million words took 18 s in each of the five searches of an epoch."""
    words = Words(map(str, range(_MOST_PARTS + 1)))
    assert optimizers_in(SimpleNamespace(tokenizer=SimpleNamespace(words=words))) == []


def test_elastic_averaging_is_found_wherever_the_model_holds_it(comm: Comm) -> None:
    net = Parts(averaged, [])
    plain = keras.optimizers.SGD(0.05)
    net.more = {"elastic": cx.DistributedOptimizer(plain, strategy="elastic_averaging")}
    assert trains_alone(net)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has none")
def test_the_parts_of_a_multi_optimizer_are_refused(comm: Comm) -> None:
    net = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
    held = keras.optimizers.OptimizerMap(cx.DistributedOptimizer(keras.optimizers.SGD(0.05)))
    net.compile(keras.optimizers.MultiOptimizer(held), "mse", jit_compile=False)
    with pytest.raises(cx.ConfigurationError, match="MultiOptimizer"):
        net.fit(data(), data(), verbose=0, callbacks=[cx.callbacks.BroadcastState()])


def test_a_hook_searches_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `fit` searched all layers 19 times, a third of its fixed cost with 800 variables."""
    looked_into: list[type] = []

    def record(cls: type) -> Any:
        looked_into.append(cls)
        return _look_into(cls)

    monkeypatch.setattr("tfcommx.optim.wrapped._look_into", record)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.namespace = SimpleNamespace()
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    callbacks = [cx.callbacks.BroadcastState()]
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=callbacks)
    assert looked_into.count(SimpleNamespace) == 4
