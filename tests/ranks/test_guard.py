"""Users' omissions do not fail silently; runs on as many processes as the launch has."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from rank_helpers import (
    SPARSE,
    batch,
    compiled,
    gradients_of,
    model,
    same_on_all_ranks,
    weights,
)

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm
from tfcommx.optim.wrapped import exchanger_in
from tfcommx.runtime import replica_guard


@pytest.fixture(autouse=True)
def _all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_guard, "RANK_0_FIRST_SECONDS", 0.0)


@pytest.fixture
def refused(comm: Comm) -> Callable[[str], AbstractContextManager[object]]:
    """Expect an error of the guard."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    return lambda named: pytest.raises(Exception, match=named)


def wrapped(every: int | None = 4, rate: float = 0.1, **options: Any) -> Any:
    return cx.DistributedOptimizer(
        keras.optimizers.SGD(rate), check_replicas_every=every, **options
    )


def fit(net: keras.Model, comm: Comm, *extra: Any, epochs: int = 3) -> None:
    x, y = batch(comm.rank, rows=32)
    net.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(extra))


def test_other_seeds_without_broadcast_are_an_error_at_the_first_step(
    comm: Comm, refused: Any
) -> None:
    net = compiled(wrapped(), seed=comm.rank)
    with refused(r"(?s)ReplicaError.*hidden/kernel.*BroadcastState"):
        fit(net, comm)


def test_a_loop_without_broadcast_is_an_error_at_the_first_step(comm: Comm, refused: Any) -> None:
    net, optimizer = model(seed=comm.rank), wrapped()
    with refused(r"hidden/kernel.*broadcast_variables"):
        optimizer.apply(gradients_of(net, batch(comm.rank)), net.trainable_variables)


class OwnRate(keras.callbacks.Callback):
    """As ReduceLROnPlateau does with a rank's own metric."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.rank:
            self.model.optimizer.learning_rate = 5e-5


def test_a_rate_of_one_rank_is_an_error_within_the_interval(comm: Comm, refused: Any) -> None:
    net = compiled(wrapped(every=4))
    with refused(r"(?s)ReplicaError.*step [48]\D+\b0\.1\b.*rank 0\b"):
        fit(net, comm, callbacks.BroadcastState(), OwnRate(comm.rank))
    if comm.topology.size > 1:
        assert int(net.optimizer.iterations) <= 8


@pytest.mark.extended
def test_unequal_rates_in_a_short_run_are_named_at_its_end(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """The guard's next check was due after the run, whose ranks ended with different weights."""
    with caplog.at_level(logging.WARNING, "tfcommx"):
        fit(compiled(wrapped(every=100)), comm, callbacks.BroadcastState(), OwnRate(comm.rank))
    named = [record for record in caplog.records if "learning rate" in record.getMessage()]
    assert len(named) == (comm.topology.size > 1)
    assert all("on rank 0" in record.getMessage() for record in named)


def test_weights_that_one_rank_sets_in_a_short_run_are_named_at_its_end(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """The guard's next check was due after the run: ranks ended with different weights."""

    def halve(epoch: int, logs: Any) -> None:
        if comm.rank:
            net.layers[0].kernel.assign(net.layers[0].kernel / 2)

    net = compiled(wrapped(every=100), run_eagerly=True)
    with caplog.at_level(logging.WARNING, "tfcommx"):
        fit(net, comm, callbacks.BroadcastState(), epochs=1)
        assert "Replicas differ" not in caplog.text
        setting = keras.callbacks.LambdaCallback(on_epoch_end=halve)
        fit(net, comm, callbacks.BroadcastState(), setting, epochs=1)
    named = [record for record in caplog.records if "hidden/kernel" in record.getMessage()]
    assert len(named) == (comm.topology.size > 1)
    assert all("rank 0 against rank" in record.getMessage() for record in named)


class Codes(keras.layers.Layer):
    """Holds a code book that follows the batch, as a VQ-VAE does, without the other ranks."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(4, shape[-1]), trainable=False, name="codes")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.codes.assign(0.9 * self.codes + 0.1 * inputs[:4])
        return inputs


def test_state_that_a_users_layer_assigns_is_named_at_the_end_of_fit(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank trained with its own code book, and rank 0's was saved, without a word."""
    normalization = keras.layers.BatchNormalization()  # Its statistics are no news
    parts = [keras.layers.Input((12,)), Codes(name="book"), normalization, keras.layers.Dense(3)]
    net = keras.Sequential(parts)
    net.compile(wrapped(), loss="sparse_categorical_crossentropy", run_eagerly=True)
    with caplog.at_level(logging.WARNING, "tfcommx"):
        fit(net, comm, callbacks.BroadcastState(), epochs=1)
        fit(net, comm, callbacks.BroadcastState(), callbacks.AverageBatchNorm(), epochs=1)
    named = [record.getMessage() for record in caplog.records if "differ" in record.getMessage()]
    assert len(named) == (comm.topology.size > 1)
    assert all("1 of 1" in text and "book/codes" in text for text in named)


@pytest.mark.exhaustive  # test_replica_guard.py disarms it
def test_without_the_guard_ranks_drift_apart_in_silence(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = compiled(wrapped(every=None))
    fit(net, comm, callbacks.BroadcastState(), OwnRate(comm.rank))
    assert not same_on_all_ranks(comm, net)


@pytest.mark.exhaustive  # test_step_ahead.py on threads
def test_a_strategy_that_lets_weights_differ_is_not_disturbed(comm: Comm) -> None:
    net = compiled(wrapped(every=1, strategy=cx.strategies.Rebroadcast(every=3)), seed=comm.rank)
    fit(net, comm)
    assert int(net.optimizer.iterations) == 12


class Late(keras.Model):
    """Keras builds it in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.out(x)


@pytest.mark.extended
def test_what_the_first_step_builds_is_compared_from_the_second_on(
    comm: Comm, refused: Any
) -> None:
    def unbuilt() -> keras.Model:
        keras.utils.set_random_seed(comm.rank)
        net = Late()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(wrapped(every=2), loss=loss, jit_compile=False)
        return net

    net = unbuilt()
    fit(net, comm, callbacks.BroadcastState())
    assert same_on_all_ranks(comm, net)
    with refused("ReplicaError"):
        fit(unbuilt(), comm)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_wrapped_optimizer_exchanges(comm: Comm, make: Any) -> None:
    net = model()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    plain = keras.optimizers.SGD(schedule, momentum=0.9)
    optimizer = make(cx.DistributedOptimizer(plain, SPARSE, op="sum"))
    assert optimizer.exchanger.requested.schemes == {"*": SPARSE}
    assert optimizer.exchanger.settings.operation == "sum"
    before = comm.traffic()
    for step in range(2):
        optimizer.apply(gradients_of(net, batch(comm.rank, step)), net.trainable_variables)
    assert same_on_all_ranks(comm, net)
    assert (sum(comm.traffic()) > sum(before)) == (comm.topology.size > 1)


@pytest.mark.one_rank
@pytest.mark.parametrize("scaled", [False, True])
def test_a_deep_copy_keeps_attributes_that_the_config_lacks(comm: Comm, scaled: bool) -> None:
    """Weight decay shrank the biases that the original excludes from it."""
    plain = keras.optimizers.SGD(1.0, weight_decay=0.5)
    plain.exclude_from_weight_decay(var_names=["bias"])
    plain.note = "of the user"
    if scaled:
        plain = keras.optimizers.LossScaleOptimizer(plain)
    copied = copy.deepcopy(cx.DistributedOptimizer(plain))
    bias = keras.Variable(np.ones(2, "float32"), name="bias")
    copied.apply([tf.zeros(2)], [bias])
    np.testing.assert_array_equal(bias.numpy(), 1.0)
    assert getattr(copied, "inner_optimizer", copied).note == "of the user"


def test_a_fresh_optimizer_takes_over_what_the_old_one_has_not_sent(comm: Comm) -> None:
    """Residuals of two sparse steps are sent by the new optimizer's dense steps after a compile."""
    net, ones = model(), None
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(1.0), SPARSE))
    for variable in net.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    ones = [tf.ones(variable.shape) for variable in net.trainable_variables]
    for _ in range(2):
        net.optimizer.apply(ones, net.trainable_variables)
    waiting = exchanger_in(net.optimizer).export().residuals
    assert any(part.any() for part in waiting.values())
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    net.optimizer.apply(ones, net.trainable_variables)
    for value in weights(net):
        np.testing.assert_allclose(value, -3.0, rtol=1e-6)


@pytest.mark.one_rank
def test_after_the_warm_up_a_schedule_has_the_rate(comm: Comm) -> None:
    """Horovod's recipe: five epochs of warm-up, a tenth of the rate from epoch five on."""
    rates: list[float] = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    fit(
        compiled(wrapped(rate=0.4)),
        comm,
        callbacks.BroadcastState(),
        callbacks.WarmUp(0.4, steps=5 * 4, start=0.1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.04 if epoch >= 5 else rate),
        Note(),
        epochs=7,
    )
    np.testing.assert_allclose(rates[:20], [0.1 + 0.3 * step / 20 for step in range(20)], rtol=1e-5)
    np.testing.assert_allclose(rates[20:], 0.04, rtol=1e-5)


@pytest.mark.one_rank
def test_a_warm_up_of_a_schedule_is_refused_in_words(comm: Comm) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(schedule)))
    with pytest.raises(cx.ConfigurationError, match=r"WarmUp\b.*CosineDecay"):
        fit(net, comm, callbacks.WarmUp(0.1, steps=3))
    with pytest.raises(cx.ConfigurationError, match=r"`learning_rate`.*CosineDecay object"):
        callbacks.WarmUp(schedule, steps=3)


def test_the_standard_callback_averages_before_and_agrees_after(comm: Comm) -> None:
    """A rank that alone would stop, or lower its rate, does it with the others or not at all."""
    seen: list[float] = []

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(logs["loss"])
            self.model.stop_training = epoch == 1 and comm.rank == 0

    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10.0)
    net = compiled(wrapped(every=1), seed=comm.rank)
    fit(net, comm, callbacks.Standard(plateau, Stop()), epochs=6)
    assert len(seen) == 2 and int(net.optimizer.iterations) == 8
    assert all(other == seen for other in comm.gather_objects(seen))
    assert same_on_all_ranks(comm, net)


def test_a_model_made_on_one_rank_more_does_not_break_a_loop(comm: Comm) -> None:
    """Keras numbers layers as they are made, so the same variable has different paths on ranks."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")

    def net() -> keras.Model:
        return keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(3)])

    if comm.rank:
        net()
    own, optimizer = net(), wrapped()
    cx.broadcast_variables(own.weights)
    optimizer.apply(gradients_of(own, batch(comm.rank)), own.trainable_variables)
    assert same_on_all_ranks(comm, own)
