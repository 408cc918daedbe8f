"""Optimizers and arguments of users that once went wrong without a word."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import batch, compiled, fit, gradients_of, model, one_weight, weights

import tfcommx as cx
from tfcommx.collectives.comm import Comm


class Steps(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


@keras.saving.register_keras_serializable("tests")
class Registered(keras.optimizers.SGD):
    pass


class Multiplied(keras.optimizers.SGD):
    """Its config lacks the factor."""

    def __init__(self, learning_rate: float = 0.1, factor: float = 1.0, **more: Any) -> None:
        super().__init__(learning_rate, **more)
        self.factor = factor


class ByShape(keras.optimizers.SGD):
    """Has rates by the number of dimensions; its config lacks all its arguments."""

    def __init__(
        self,
        learning_rate: float = 0.1,
        factors: dict[int, float] | None = None,
        decay: Any = None,
        masks: Any = (),
        **more: Any,
    ) -> None:
        super().__init__(learning_rate, **more)
        self.factors, self.decay, self.masks = factors or {1: 1.0}, decay, list(masks)
        self.clip = self.halved

    def halved(self, gradient: tf.Tensor) -> tf.Tensor:
        return gradient / 2

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        factor = self.factors.get(len(variable.shape), 1.0)
        super().update_step(self.clip(gradient), variable, learning_rate * factor)


class Forgetful(keras.optimizers.SGD):
    def __init__(self, needed: int, **more: Any) -> None:
        super().__init__(**more)


@pytest.mark.one_rank
def test_optimizers_that_keras_cannot_write_down(comm: Comm, tmp_path: Path) -> None:
    for rate in (Steps(), lambda: 0.1):
        net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(rate)))
        fit(net, comm, epochs=1)
        assert net.optimizer._learning_rate is rate
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate))
        for optimizer in (cx.DistributedOptimizer(scaled), scaled):
            assert optimizer.inner_optimizer._learning_rate is rate
        sharded = cx.DistributedOptimizer(keras.optimizers.SGD(rate), strategy="sharded")
        sharded.build(net.trainable_variables)
        sharded.load_own_variables({"0": np.int64(3)})
        assert sharded.iterations == 3
    with pytest.raises(cx.ConfigurationError, match=r"Forgetful.*get_config"):
        cx.DistributedOptimizer(Forgetful(1, learning_rate=0.1))
    assert cx.DistributedOptimizer(Multiplied(factor=5.0)).factor == 5.0
    net = compiled(cx.DistributedOptimizer(Registered(0.1)))
    net.save(tmp_path / "model.keras")
    assert type(keras.models.load_model(tmp_path / "model.keras").optimizer) is Registered


@pytest.mark.one_rank
@pytest.mark.parametrize("kind", ["plain", "loss scale", "deep copy"])
def test_rates_by_shape_stay_if_the_config_lacks_them(comm: Comm, kind: str) -> None:
    """The wrap had the constructor's defaults, so that all variables trained at the full rate."""
    masks = [np.ones(3), keras.layers.Dense(2)]
    optimizer: Any = ByShape(0.1, {2: 0.0}, Steps(), masks)
    if kind == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
    wrapped = cx.DistributedOptimizer(optimizer)
    if kind == "deep copy":
        wrapped.build([keras.Variable(np.zeros(2), name="before")])
        wrapped = copy.deepcopy(wrapped)
    inner = wrapped.inner_optimizer if kind == "loss scale" else wrapped
    assert isinstance(inner.decay, Steps) and inner.masks[1] is masks[1]
    assert inner.clip.__self__ is inner
    net = model()
    before = weights(net)
    wrapped.apply(gradients_of(net, batch(comm.rank)), net.trainable_variables)
    changed = [np.any(old != new) for old, new in zip(before, weights(net), strict=True)]
    assert changed == [False, True, True, True, False, True]


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("optimizer", "options", "received"),
    [
        ("sgd", {}, "'sgd'"),
        (keras.optimizers.SGD, {}, "SGD'>"),
        (None, {}, r"optimizers\.SGD.*None"),
        (keras.Sequential(), {}, "<Sequential"),
        ("good", {"scheme": "torus"}, "'torus'"),
        ("good", {"scheme": {"*": "torus"}}, "'torus'"),
        ("good", {"scheme": {0: cx.Scheme()}}, r"\b0\b"),
        ("good", {"plan": "x"}, "`plan`.*'x'"),
        ("adam", {}, r"optimizers\.get\('adam'\)"),
        (tf.compat.v1.train.AdamOptimizer(0.1), {}, r"TensorFlow 1\b.*`fit`"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    comm: Comm, optimizer: Any, options: dict[str, Any], received: str
) -> None:
    with pytest.raises(cx.ConfigurationError, match=received):
        cx.DistributedOptimizer(
            keras.optimizers.SGD(0.1) if optimizer == "good" else optimizer, **options
        )


def test_float8_state_is_refused(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = model()
    net.trainable_variables[0].overwrite_with_gradient = True
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(cx.ConfigurationError, match=r"'net/hidden/kernel'.*float8"):
        optimizer.apply(
            [tf.ones(variable.shape) for variable in net.trainable_variables],
            net.trainable_variables,
        )


@pytest.mark.parametrize("route", ["allreduce", "torus", "asa"])
def test_a_sum_that_float16_cannot_hold_arrives(comm: Comm, route: str) -> None:
    net = one_weight(keras.optimizers.SGD(1e-6))
    net.compile(
        cx.DistributedOptimizer(
            keras.optimizers.SGD(1e-6), cx.Scheme(route, wire="float16"), op="sum"
        ),
        loss="mse",
        jit_compile=False,
    )
    net.optimizer.apply([tf.constant([[4e4]])], net.trainable_variables)
    assert weights(net)[0].item() == pytest.approx(-0.04 * comm.topology.size, rel=1e-6)


class Relays(keras.optimizers.SGD):
    """As optimizers around others are written: the inner one takes the step."""

    def apply(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable] | None = None
    ) -> None:
        keras.optimizers.SGD(0.1).apply(grads, trainable_variables)


class StepsByItself(keras.optimizers.SGD):
    """Passes Keras's own step, as every optimizer would if a later Keras renamed its parts."""

    def _backend_apply_gradients(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable]
    ) -> None:
        for grad, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(0.1 * grad)


def test_an_optimizer_that_is_set_without_compile_exchanges(comm: Comm) -> None:
    """As `model.optimizer = hvd.DistributedOptimizer(model.optimizer)` of horovod#120."""
    net = compiled(keras.optimizers.SGD(0.01))
    with cx.allow_plain_optimizers():
        net.fit(*batch(comm.rank, rows=32), batch_size=8, verbose=0)
    net.optimizer = cx.DistributedOptimizer(net.optimizer, cx.Scheme())
    assert fit(net, comm, epochs=1).identical
    assert int(net.optimizer.iterations) == 8


@pytest.mark.one_rank
@pytest.mark.parametrize("eagerly", [False, case(True, kept=False)])
def test_an_optimizer_that_goes_past_the_exchange_is_refused(comm: Comm, eagerly: bool) -> None:
    optimizers = [Relays(), StepsByItself()]
    if hasattr(keras.optimizers, "MultiOptimizer"):  # Since Keras 3.15
        each = keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1), {".*out.*": keras.optimizers.Adam()}
        )
        optimizers.append(keras.optimizers.MultiOptimizer(each))
    for optimizer in optimizers:
        net = compiled(cx.DistributedOptimizer(optimizer))
        net.run_eagerly = eagerly
        with pytest.raises(cx.ConfigurationError, match=f"'{optimizer.name}'"):
            fit(net, comm, epochs=1)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        case(keras.optimizers.Adafactor, "synchronous", kept=False),
        (keras.optimizers.Nadam, "synchronous"),
        (keras.optimizers.Nadam, "sharded"),
    ],
)
def test_a_built_optimizer_with_loss_scaling_is_copied_whole(
    comm: Comm, kind: type, strategy: str
) -> None:
    def built() -> keras.optimizers.Optimizer:
        variables = [keras.Variable(np.ones(shape, np.float32)) for shape in ((12, 30), (30,))]
        optimizer = keras.optimizers.LossScaleOptimizer(kind(0.1))
        for _ in range(3):
            optimizer.apply(
                [tf.ones(variable.shape) * 2.0**15 for variable in variables], variables
            )
        return optimizer

    plain, wrapped = built(), cx.DistributedOptimizer(built(), strategy=strategy)
    variables = plain._trainable_variables, wrapped._trainable_variables
    for optimizer, own in zip((plain, wrapped), variables, strict=True):
        optimizer.apply([tf.ones(variable.shape) * 2.0**15 for variable in own], own)
    for one, other in zip(*variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)


class Temperature(keras.losses.Loss):
    """A loss with a variable, which the model does not list because a loss is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = keras.Variable(np.float32(2.0), name="scale")

    def call(self, labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(
            labels, outputs * self.scale, from_logits=True
        )


class LearnsItsLoss(keras.Sequential):
    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        inputs, labels = data
        variables = [*self.trainable_variables, self.temperature.scale]
        with tf.GradientTape() as tape:
            loss = self.temperature(labels, self(inputs, training=True))
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


@pytest.mark.extended
@pytest.mark.parametrize(
    "kind", ["momentum", case("loss scale", kept=False), case("one bit", kept=False)]
)
def test_a_step_may_train_variables_that_the_model_does_not_list(comm: Comm, kind: str) -> None:
    """As those of a loss, with Keras. `BroadcastState` had built the optimizer without them."""
    optimizer: keras.optimizers.Optimizer = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
    scheme: cx.Scheme | None = cx.Scheme("hitopk", "mstopk", 0.2, dense_below=8)
    if kind == "one bit":
        optimizer, scheme = cx.optimizers.OneBitAdam(0.01, freeze_after=2, dense_below=8), None
    states = 1 + optimizer.use_ema if kind != "one bit" else 2
    if kind == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    net = LearnsItsLoss([keras.Input((12,)), keras.layers.Dense(16), keras.layers.Dense(3)])
    net.temperature = Temperature()
    net.compile(cx.DistributedOptimizer(optimizer, scheme), jit_compile=False)
    fit(net, comm)
    scales = comm.gather_objects(float(net.temperature.scale))
    assert scales[0] != 2.0 and len(set(scales)) == 1
    own = len(net.optimizer.variables) - states * (len(net.trainable_variables) + 1)
    assert own == {"momentum": 2, "loss scale": 6, "one bit": 5}[kind]
    assert int(net.optimizer.iterations) == 8
