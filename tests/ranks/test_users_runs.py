"""Runs of users that once went wrong without a word: unlike ranks, changing variables."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import SPARSE, batch, compiled, fit, model, weights

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm
from tfcommx.optim import broadcast
from tfcommx.optim.broadcast import SEED_STEP


@pytest.mark.extended
def test_a_run_that_begins_late_begins_with_what_earlier_epochs_set(comm: Comm) -> None:
    net, resolution = (
        compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.05), SPARSE)),
        tf.Variable(4),
    )
    switch = callbacks.SwitchScheme(
        {1: cx.Scheme("allgather", "exact", 0.5), 2: cx.Scheme("torus"), 9: SPARSE},
        {2: 8, 9: 16},
        resolution,
    )
    net.optimizer.build(net.trainable_variables)
    net.optimizer.iterations.assign(100)
    rates: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(net.optimizer.learning_rate))

    fit(
        net, comm, epochs=4, extra=(switch, callbacks.WarmUp(0.4, 4, 0.0), Watch()), initial_epoch=3
    )
    assert resolution.numpy() == 8 and net.optimizer.exchanger.requested.schemes == {
        "*": cx.Scheme("torus")
    }
    np.testing.assert_allclose(rates, 0.05)  # the warm-up was over


def test_ranks_that_would_wait_for_each_other_are_told(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    x, y = np.zeros((24, 12), np.float32), np.zeros(24, np.int32)
    net, rows = (
        compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1))),
        24 if comm.rank == 0 else 16,
    )
    with pytest.raises(cx.ConfigurationError, match=r"\[3, 2.*`steps_per_epoch`"):
        net.fit(x[:rows], y[:rows], batch_size=8, verbose=0, callbacks=[callbacks.BroadcastState()])
    kind = keras.optimizers.SGD if comm.rank == 0 else keras.optimizers.Adam
    net = compiled(cx.DistributedOptimizer(kind(0.1)))
    with pytest.raises(cx.ConfigurationError, match=r"rank \d.*_momentum'"):
        net.fit(x, y, batch_size=8, verbose=0, callbacks=[callbacks.BroadcastState()])


def test_one_rank_alone_runs_its_steps_eagerly(comm: Comm) -> None:
    """As to debug on rank 0. The ranks waited for each other in the first step."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    x, y = batch(comm.rank)
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    net = compiled(optimizer, run_eagerly=comm.rank == 0)
    with pytest.raises(cx.ConfigurationError, match=r"\[True, False\b.*`run_eagerly`"):
        net.fit(x, y, verbose=0, callbacks=[callbacks.BroadcastState()])


def test_class_weights_of_a_rank_s_own_labels_are_refused(comm: Comm) -> None:
    """Gradients of ranks that weight classes otherwise have no common loss; it was not said."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    x, y = batch(comm.rank)
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
    shares = {0: 1.0, 1: 1.0, 2: 1.5 + comm.rank}
    begin = callbacks.BroadcastState()
    with pytest.raises(cx.ConfigurationError, match=r"2: 1\.5\b.*2: 2\.5\b.*compare=False"):
        net.fit(x, y, verbose=0, class_weight=shares, callbacks=[begin])
    # Equal numbers of another type and order
    weights = {0: 1, 1: 1, 2: 3} if comm.rank else {2: np.float64(3), 1: 1.0, 0: 1.0}
    net.fit(x, y, verbose=0, class_weight=weights, callbacks=[begin])


def test_a_rank_that_stops_alone_after_an_epoch_is_named_on_all(comm: Comm) -> None:
    """The others waited for it in the next epoch, forever if it had other work to do."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net, ended = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1))), []

    def stop(epoch: int, logs: Any) -> None:
        ended.append(epoch)
        net.stop_training = comm.rank == 1

    with pytest.raises(cx.ConfigurationError, match=r"\[1, None.*`stop_training`"):
        fit(net, comm, 3, (keras.callbacks.LambdaCallback(on_epoch_end=stop),))
    assert ended == [0]
    net.stop_training = False
    assert fit(net, comm, epochs=2).identical


@pytest.mark.extended
@pytest.mark.parametrize("chief", [0, case(1, kept=False)])
def test_a_callback_that_one_rank_alone_has_is_named(comm: Comm, chief: int) -> None:
    """Each rank took the objects of the other's exchange: "too many values to unpack"."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, y = batch(comm.rank, rows=32)
    added = [callbacks.BroadcastState()] if comm.rank == chief else None
    with pytest.raises(cx.ConfigurationError, match=r"BroadcastState.on_train_begin\) on rank"):
        net.fit(x, y, batch_size=8, verbose=0, callbacks=added)
    assert fit(net, comm, epochs=1).identical


@pytest.mark.extended
def test_an_optimizer_that_one_rank_alone_makes(comm: Comm) -> None:
    """Keras's numbers of optimizers are in names of operations, by which Horovod knows tensors."""
    if comm.rank == 0:
        keras.optimizers.SGD()
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert fit(compiled(cx.DistributedOptimizer(scaled, SPARSE)), comm, epochs=1).identical


def test_metrics_of_one_rank_alone(comm: Comm) -> None:
    logs = {"loss": float(comm.rank), **({"val_loss": 5.0} if comm.rank == 0 else {})}
    callbacks.AverageMetrics().on_epoch_end(0, logs)
    # Every rank has it, because EarlyStopping must decide alike on all
    assert logs == {"loss": (comm.topology.size - 1) / 2, "val_loss": 5.0}


def test_unsigned_state_is_broadcast(comm: Comm) -> None:
    class Counts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(
                shape=(2,), dtype="uint32", trainable=False, initializer="zeros", name="count"
            )

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return inputs

    net = keras.Sequential([keras.layers.Input((12,)), counts := Counts(), keras.layers.Dense(3)])
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    counts.count.assign([7 + comm.rank, 2**32 - 1])
    net.fit(np.zeros((2, 12)), np.zeros((2, 3)), verbose=0, callbacks=[callbacks.BroadcastState()])
    assert counts.count.numpy().tolist() == [7, 2**32 - 1]


@pytest.mark.one_rank
def test_a_pattern_that_matches_nothing_is_said(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    net = compiled(
        cx.DistributedOptimizer(
            keras.optimizers.SGD(0.1), {"hidden*": SPARSE, "*out*": SPARSE, "*": cx.Scheme()}
        )
    )
    with caplog.at_level(logging.WARNING, "tfcommx"):
        fit(net, comm, epochs=1)
    said = [record for record in caplog.records if record.name == "tfcommx"]
    assert [record.args[0] for record in said] == ["hidden*"]


def test_a_gradient_that_comes_no_more_is_said(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = model(), cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    grads = [tf.ones(variable.shape) for variable in net.trainable_variables]
    with caplog.at_level(logging.WARNING, "tfcommx"):
        optimizer.apply(grads, net.trainable_variables)
        assert not caplog.records
        optimizer.apply([None, *grads[1:]], net.trainable_variables)
    assert [record.args[0] for record in caplog.records] == [net.trainable_variables[0].path]


class Adversaries(keras.Model):
    """Two networks, two optimizers and a custom training step, as in Keras's GAN examples."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = keras.layers.Dense(12), keras.layers.Dense(1)
        self.maker.build((None, 4))
        self.judge.build((None, 12))

    def compile(
        self,
        maker_optimizer: keras.optimizers.Optimizer,
        judge_optimizer: keras.optimizers.Optimizer,
    ) -> None:
        super().compile(jit_compile=False)
        self.maker_optimizer, self.judge_optimizer = maker_optimizer, judge_optimizer

    def train_step(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        noise = x[:, :4]
        with tf.GradientTape(persistent=True) as tape:
            made, real = (
                tf.reduce_mean(self.judge(self.maker(noise))),
                tf.reduce_mean(self.judge(x)),
            )
            one, other = made - real, (made - 1.0) ** 2
        for optimizer, loss, layer in (
            (self.judge_optimizer, one, self.judge),
            (self.maker_optimizer, other, self.maker),
        ):
            optimizer.apply(
                tape.gradient(loss, layer.trainable_variables), layer.trainable_variables
            )
        return {"loss": one}


@pytest.mark.exhaustive  # test_training_kinds.py has a shared layer
def test_two_optimizers_of_one_model(comm: Comm) -> None:
    keras.utils.set_random_seed(comm.rank)
    net = Adversaries()
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.Adam(0.01), SPARSE),
        cx.DistributedOptimizer(keras.optimizers.SGD(0.01)),
    )
    net.fit(
        np.random.default_rng(comm.rank).normal(size=(32, 12)).astype(np.float32),
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[callbacks.BroadcastState()],
    )
    for theirs in comm.gather_objects(weights(net)):
        for one, other in zip(weights(net), theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    assert net.maker_optimizer.exchanger.runs and net.judge_optimizer.exchanger.runs


class TrainedByItself(keras.Model):
    """A model with its own loop over callbacks and steps, which is never compiled."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        super().__init__()
        self.net, self.trainer = model(), optimizer
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.net(inputs)

    def fit(self, data: Any, listed: list[keras.callbacks.Callback]) -> None:
        variables = self.net.trainable_variables
        together = keras.callbacks.CallbackList(listed, model=self, epochs=1)
        together.on_train_begin()
        together.on_epoch_begin(0)
        for step in range(2):
            together.on_train_batch_begin(step)
            with tf.GradientTape() as tape:
                loss = self.loss_of(data[1], self(data[0]))
            self.trainer.apply(tape.gradient(loss, variables), variables)
            together.on_train_batch_end(step, logs := {"loss": float(loss)})
        together.on_epoch_end(0, logs)
        together.on_train_end(logs)


def test_a_model_without_compile_is_broadcast_and_trained(comm: Comm) -> None:
    """Keras gives it no `optimizer`: BroadcastState and WarmUp ended with an AttributeError.

    After `super().compile()` it has one that takes no steps, and WarmUp set the rate of that one.
    """
    net = TrainedByItself(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), SPARSE))
    net(batch(0)[0])
    net.net.set_weights([value + comm.rank for value in net.net.get_weights()])
    compare, warm_up = callbacks.CompareReplicas(), callbacks.WarmUp(0.4, 2)
    net.fit(batch(comm.rank), [callbacks.BroadcastState(), warm_up, compare])
    assert compare.identical and net.trainer.exchanger.runs
    assert np.isclose(float(net.trainer.learning_rate), 0.4)
    net.compile(loss="mse", jit_compile=False)
    net.fit(batch(comm.rank), [callbacks.BroadcastState(), callbacks.WarmUp(0.8, 4)])
    assert np.isclose(float(net.trainer.learning_rate), 0.8)


def test_variables_of_a_custom_loop_are_broadcast(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones of a dtype together: each waited for a cycle of Horovod's, seconds for 600."""
    monkeypatch.setattr(broadcast, "LARGEST_BATCH", 20)
    last = comm.topology.size - 1
    forms: list[tuple[tuple[int, ...], str]] = [
        ((3,), "float32"),
        ((), "int64"),
        ((2, 1), "float32"),
        ((2, 2), "bool"),
        ((2,), "complex64"),
        ((9,), "float32"),
        ((0,), "float32"),
        ((), "complex64"),
        ((), "float8_e4m3fn"),
    ]
    numbers = range(len(forms))
    variables = [
        keras.Variable(np.full(shape, 10 * comm.rank + number, dtype))
        for number, (shape, dtype) in zip(numbers, forms, strict=True)
    ]
    together = [[0, 2], [5], [6], [1], [3], [4], [7], [8]]
    batches = list(broadcast._batches(variables))
    assert [[id(part) for part in batch] for batch in batches] == [
        [id(variables[number]) for number in batch] for batch in together
    ]
    cx.broadcast_variables(variables, root=last)
    for number, variable in zip(numbers, variables, strict=True):
        np.testing.assert_array_equal(
            variable.numpy(), np.full(variable.shape, 10 * last + number, variable.dtype)
        )
    # Seeds among `model.variables`, which a moved script broadcasts, were equal, so that dropout
    # dropped the same entries on all ranks
    seeds = keras.random.SeedGenerator(7 + comm.rank)
    tf.function(lambda: cx.broadcast_variables([seeds.state], root=last))()
    states = comm.gather_objects(seeds.state.numpy().tolist())
    assert states == [
        [(7 + last + (rank - last) * SEED_STEP) % 2**31, 0] for rank in range(last + 1)
    ]
    with pytest.raises(cx.ConfigurationError, match=r"'word'"):
        cx.broadcast_variables([tf.Variable("a", name="word")])
    with pytest.raises(cx.ConfigurationError, match=rf"`root`.*\b{last + 1}\b"):
        cx.broadcast_variables(variables, root=last + 1)
    if last:
        with pytest.raises(cx.ConfigurationError, match=r"rank \d.*\(3,\), 'float32'"):
            cx.broadcast_variables(variables if comm.rank else variables[1:])


@pytest.mark.extended
@pytest.mark.parametrize("traced", [case(False, kept=False), True])
def test_residuals_move_on_when_layers_are_frozen_and_thawed(comm: Comm, traced: bool) -> None:
    """Each weight gets all that was computed for it, whichever variables train beside it."""
    variables = [
        keras.Variable(np.zeros((20, 20), np.float32), name=name)
        for name in ("base", "head", "tail")
    ]
    optimizer = cx.DistributedOptimizer(
        keras.optimizers.SGD(1.0), cx.Scheme("allgather", "mstopk", 0.1, dense_below=0), op="sum"
    )
    gradients = [
        tf.constant(
            np.random.default_rng([comm.rank, n]).integers(-60, 61, (20, 20)) / 64, tf.float32
        )
        for n in range(3)
    ]
    zeros = [tf.zeros([20, 20])] * 3

    def steps(number: int, *arguments: Any) -> None:
        step = (
            tf.function(lambda: optimizer.apply(*arguments))
            if traced
            else lambda: optimizer.apply(*arguments)
        )
        for _ in range(number):
            step()

    steps(1, gradients, variables)  # a tenth of it travels
    steps(2, gradients[1:], variables[1:])
    steps(1, zeros, variables)  # A known set again, whose plan gets the residuals of both
    assert optimizer.exchanger.export().residuals.keys() == {"base", "head", "tail"}
    steps(14, zeros, variables)
    assert not optimizer.exchanger.export().residuals
    for number, variable in enumerate(variables):
        total = sum(comm.gather_objects(gradients[number].numpy()))
        np.testing.assert_array_equal(variable.numpy(), -total * (3 if number else 1))


def test_residuals_return_to_an_optimizer_that_is_used_again(comm: Comm) -> None:
    variable = keras.Variable(np.zeros((20, 20), np.float32), name="w")
    scheme = cx.Scheme("allgather", "mstopk", 0.1, dense_below=0)
    first, second = (
        cx.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme, op="sum") for _ in range(2)
    )
    gradient = np.random.default_rng(comm.rank).integers(-60, 61, (20, 20)) / 64
    for optimizer in (first, second):
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])
    for _ in range(20):
        first.apply([tf.zeros([20, 20])], [variable])
    np.testing.assert_array_equal(variable.numpy(), -2 * sum(comm.gather_objects(gradient)))


@pytest.mark.extended
@pytest.mark.parametrize("of_optimizers", [case(False, kept=False), True])
def test_one_rank_may_trace_a_step_again_whose_parts_share_variables(
    comm: Comm, of_optimizers: bool
) -> None:
    """As for a shorter last batch: it waited for the others, to move residuals."""
    variables = [keras.Variable(np.zeros((20, 20), np.float32), name=name) for name in "abc"]
    scheme = cx.Scheme("allgather", "mstopk", 0.1, dense_below=0)
    first, other = (
        cx.DistributedOptimizer(keras.optimizers.SGD(1.0), scheme, op="sum") for _ in range(2)
    )
    second = other if of_optimizers else first
    first.build(variables)
    other.build(variables)
    gradient = np.random.default_rng(comm.rank).integers(-60, 61, (20, 20)) / 64

    @tf.function
    def step(batch: tf.Tensor) -> None:
        scaled = tf.constant(gradient, tf.float32) * tf.reduce_mean(batch)
        first.apply([scaled, scaled], variables[:2])
        second.apply([scaled, scaled], variables[1:])

    for rows in (8, 8, 8 - comm.rank, 8):
        step(tf.ones([rows]))
    optimizers = [first, second] if of_optimizers else [first]
    residuals = [optimizer.exchanger.export().residuals for optimizer in optimizers]
    total = sum(comm.gather_objects(gradient))
    for variable, times in zip(variables, (4, 8, 4), strict=True):
        unsent = sum(part[variable.path] for part in residuals if variable.path in part)
        unsent = sum(comm.gather_objects(np.asarray(unsent, np.float64) + np.zeros(400)))
        np.testing.assert_array_equal(unsent.reshape(20, 20) - variable.numpy(), times * total)


@pytest.mark.parametrize("strategy", ["step_ahead", cx.strategies.WeightAveraging(every=2)])
def test_sets_of_variables_that_take_turns_begin_with_equal_weights(
    comm: Comm, strategy: Any
) -> None:
    variables = [keras.Variable(np.zeros((4, 4), np.float32), name=name) for name in "abc"]
    scheme = SPARSE if strategy == "step_ahead" else cx.Scheme()
    optimizer = cx.DistributedOptimizer(
        keras.optimizers.SGD(1.0), scheme, strategy=strategy, check_replicas_every=1
    )
    optimizer.build(variables)
    for chosen in (variables, variables[1:], variables[:1], variables, variables[1:]):
        optimizer.apply([tf.fill([4, 4], 1.0 + comm.rank)] * len(chosen), chosen)
    cx.consolidate(optimizer)
    if scheme is not SPARSE:
        for variable, steps in zip(variables, (3, 4, 4), strict=True):
            np.testing.assert_allclose(variable, -steps * (1 + comm.topology.size) / 2)


@pytest.mark.extended
def test_the_end_of_data_of_unknown_length_is_no_step(comm: Comm) -> None:
    """Keras finds the end in a run of the step, which carries out all that waits for no data.

    Counting the step and decaying the weights did, on some ranks perhaps and on others not.
    """
    x, y = batch(comm.rank, rows=24)
    signature = (tf.TensorSpec((8, 12), tf.float32), tf.TensorSpec((8,), tf.int64))

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in (0, 8, 16):
            yield x[start : start + 8], y[start : start + 8]

    unknown = tf.data.Dataset.from_generator(batches, output_signature=signature)
    nets = []
    for data in (unknown, tf.data.Dataset.from_tensor_slices((x, y)).batch(8)):
        plain = keras.optimizers.SGD(0.1, weight_decay=0.1)
        net = compiled(cx.DistributedOptimizer(plain, check_replicas_every=2))
        net.fit(data, epochs=2, verbose=0, shuffle=False)
        (run,) = net.optimizer.exchanger.runs.values()
        assert int(net.optimizer.iterations) == int(run.executor.steps) == 6
        nets.append(net)
    for one, other in zip(*map(weights, nets), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.one_rank
def test_variables_that_keras_does_not_know_are_named(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """Scripts for Keras 2 ran on with layers whose tf.Variable was no longer trained, nor saved."""

    class Scale(keras.layers.Layer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.factor, self.offsets = tf.Variable(2.0), [tf.Variable(0.0)]
            self.known = self.add_weight(shape=(), name="known")

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return self.factor * inputs + self.offsets[0] + self.known

    plain = model()
    net = keras.Sequential([keras.Input((12,)), Scale(name="scale"), *plain.layers], name="scaled")
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1), cx.Scheme()),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    for _ in range(2):
        net.fit(*batch(comm.rank), verbose=0, callbacks=[callbacks.BroadcastState()])
    told = [record.getMessage() for record in caplog.records if "Keras 3" in record.getMessage()]
    assert len(told) == (comm.rank == 0)
    assert all("scale.factor, scale.offsets. " in text for text in told)
