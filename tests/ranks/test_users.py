"""What users do that once went wrong without a word, on as many processes as launched this."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_optimizer import SPARSE, compiled, fit, model, weights

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.comm.base import Comm
from tfcommx.optim import checkpoint


@pytest.fixture
def folder(comm: Comm, tmp_path: Path) -> Path:
    """One that all ranks see."""
    return Path(comm.gather_objects(str(tmp_path))[0])


def test_a_checkpoint_leaves_the_users_files_alone(comm: Comm, folder: Path) -> None:
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.05), SPARSE))
    fit(net, comm, epochs=1)
    if comm.rank == 0:
        (folder / "run-0001").mkdir()
        for name in (
            "notes-2025.txt",
            "model-best-20251104.keras",
            "model-0000.keras.bak",
            f"residuals-0000-rank-{comm.topology.size:04d}.npz",
        ):
            (folder / name).write_text("")
    comm.gather_objects("written")
    for epoch in (0, 1):
        checkpoint.save(net, folder, epoch)
    comm.gather_objects("saved")
    assert sorted(path.name for path in folder.iterdir() if "residuals" not in path.name) == [
        "checkpoint.json",
        "model-0000.keras.bak",
        "model-0001.keras",
        "model-best-20251104.keras",
        "notes-2025.txt",
        "run-0001",
    ]
    # none of epoch 0, nor of a larger run
    residuals = [f"residuals-0001-rank-{rank:04d}.npz" for rank in range(comm.topology.size)]
    assert sorted(path.name for path in folder.glob("residuals-*")) == residuals


def test_a_roll_back_in_a_running_model_forgets_its_residuals(comm: Comm, folder: Path) -> None:
    def wrapped() -> keras.Model:
        return compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.05), SPARSE))

    rolled, fresh = wrapped(), wrapped()
    fit(rolled, comm, epochs=1)
    checkpoint.save(rolled, folder, 0)
    fit(rolled, comm, epochs=2, initial_epoch=1)
    for net in (rolled, fresh):
        assert checkpoint.restore(net, folder) == 1
        fit(net, comm, epochs=2, initial_epoch=1)
        assert net.optimizer.exchanger.runs and not net.optimizer.exchanger.restored
    for one, other in zip(weights(rolled), weights(fresh), strict=True):
        np.testing.assert_array_equal(one, other)


def one_weight(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="weight")
    net = keras.Sequential([keras.layers.Input((1,)), weight], name="one")
    net.compile(
        cx.DistributedOptimizer(optimizer, op="sum"),
        loss=lambda _, out: tf.reduce_mean(out),
        jit_compile=False,
    )
    return net


def test_sums_that_each_rank_accumulates_stay_its_own(comm: Comm, folder: Path) -> None:
    """Two `fit`s of one step, saved and restored between them: the step is taken with the gradients
    of all ranks and both.
    """
    ranks = comm.topology.size
    net, again = (
        one_weight(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)) for _ in range(2)
    )

    def take(step_of: keras.Model, slope: float) -> None:
        step_of.fit(
            np.full((2, 1), slope * 10.0**comm.rank, np.float32),
            np.zeros((2, 1)),
            batch_size=2,
            verbose=0,
            callbacks=[callbacks.BroadcastState()],
        )

    take(net, 1)
    checkpoint.save(net, folder, 0)
    take(net, 3)
    checkpoint.restore(again, folder)
    take(again, 3)
    wanted = -sum(10.0**rank * (1 + 3) / 2 for rank in range(ranks))
    np.testing.assert_allclose([weights(net)[0].item(), weights(again)[0].item()], wanted)


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
    assert resolution.numpy() == 8 and net.optimizer.exchanger.schemes == {"*": cx.Scheme("torus")}
    np.testing.assert_allclose(rates, 0.05)  # the warm-up was over


def test_ranks_that_would_wait_for_each_other_are_told(comm: Comm) -> None:
    if comm.topology.size == 1:
        return
    x, y = np.zeros((24, 12), np.float32), np.zeros(24, np.int32)
    net, rows = (
        compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1))),
        24 if comm.rank == 0 else 16,
    )
    with pytest.raises(cx.PlanError, match=r"same number of steps.*\[3, 2"):
        net.fit(x[:rows], y[:rows], batch_size=8, verbose=0, callbacks=[callbacks.BroadcastState()])
    kind = keras.optimizers.SGD if comm.rank == 0 else keras.optimizers.Adam
    net = compiled(cx.DistributedOptimizer(kind(0.1)))
    with pytest.raises(cx.PlanError, match=r"same variables on every rank.*rank"):
        net.fit(x, y, batch_size=8, verbose=0, callbacks=[callbacks.BroadcastState()])


def test_an_optimizer_that_one_rank_alone_makes(comm: Comm) -> None:
    """Keras numbers optimizers, and their numbers are in the names of operations, by which Horovod
    knows tensors.
    """
    if comm.rank == 0:
        keras.optimizers.SGD()
    fit(
        compiled(
            cx.DistributedOptimizer(
                keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), SPARSE
            )
        ),
        comm,
        epochs=1,
    )


def test_metrics_of_one_rank_alone(comm: Comm) -> None:
    logs = {"loss": float(comm.rank), **({"val_loss": 5.0} if comm.rank == 0 else {})}
    callbacks.AverageMetrics().on_epoch_end(0, logs)
    assert logs == {
        "loss": (comm.topology.size - 1) / 2,
        **({"val_loss": 5.0} if comm.rank == 0 else {}),
    }


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


class Steps(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        return 0.1 / (1.0 + tf.cast(step, tf.float32))


@keras.saving.register_keras_serializable("tests")
class Registered(keras.optimizers.SGD):
    pass


class Forgetful(keras.optimizers.SGD):
    def __init__(self, needed: int, **more: Any) -> None:
        super().__init__(**more)


def test_optimizers_that_keras_cannot_write_down(comm: Comm, tmp_path: Path) -> None:
    for rate in (Steps(), lambda: 0.1):
        net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(rate)))
        fit(net, comm, epochs=1)
        assert net.optimizer._learning_rate is rate
    with pytest.raises(cx.PlanError, match=r"Forgetful.*get_config"):
        cx.DistributedOptimizer(Forgetful(1, learning_rate=0.1))
    net = compiled(cx.DistributedOptimizer(Registered(0.1)))
    net.save(tmp_path / "model.keras")
    assert type(keras.models.load_model(tmp_path / "model.keras").optimizer) is Registered


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
    assert [record.args[0] for record in caplog.records] == ["hidden*"]


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


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {}),
        (keras.optimizers.SGD, {}),
        (None, {}),
        (keras.Sequential(), {}),
        ("good", {"scheme": "torus"}),
        ("good", {"scheme": {"*": "torus"}}),
        ("good", {"scheme": {0: cx.Scheme()}}),
        ("good", {"plan": "x"}),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    comm: Comm, optimizer: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(cx.PlanError, match="Received"):
        cx.DistributedOptimizer(
            keras.optimizers.SGD(0.1) if optimizer == "good" else optimizer, **options
        )


def test_float8_state_is_refused(comm: Comm) -> None:
    net = model()
    net.trainable_variables[0].overwrite_with_gradient = True
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if comm.topology.size > 1:
        with pytest.raises(cx.PlanError, match="overwrites with their gradients"):
            optimizer.apply(
                [tf.ones(variable.shape) for variable in net.trainable_variables],
                net.trainable_variables,
            )


def test_a_sum_that_float16_cannot_hold_stays_finite(comm: Comm) -> None:
    net = one_weight(keras.optimizers.SGD(1e-6))
    net.compile(
        cx.DistributedOptimizer(
            keras.optimizers.SGD(1e-6), cx.Scheme("asa", wire="float16"), op="sum"
        ),
        loss="mse",
        jit_compile=False,
    )
    net.optimizer.apply([tf.constant([[4e4]])], net.trainable_variables)
    assert -0.07 < weights(net)[0].item() < 0


class Adversaries(keras.Model):
    """As Keras's own GAN examples are written: two networks, two optimizers, a training step of its
    own.
    """

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


def test_variables_of_a_custom_loop_are_broadcast(comm: Comm) -> None:
    last = comm.topology.size - 1
    variables = [
        keras.Variable(np.full(shape, comm.rank, dtype))
        for shape, dtype in (((3,), "float32"), ((), "int64"), ((2, 2), "bool"))
    ]
    cx.broadcast_variables(variables, root=last)
    for variable in variables:
        np.testing.assert_array_equal(
            variable.numpy(), np.full(variable.shape, last, variable.dtype)
        )
    with pytest.raises(cx.PlanError, match="must be a rank"):
        cx.broadcast_variables(variables, root=last + 1)
    if last:
        with pytest.raises(cx.PlanError, match="same variables on every rank"):
            cx.broadcast_variables(variables if comm.rank else variables[1:])


def test_a_model_that_one_rank_alone_has_loaded(comm: Comm, folder: Path) -> None:
    """Keras gives its variables other paths than those of a model that is built."""
    net = compiled(cx.DistributedOptimizer(keras.optimizers.Adam(0.01), SPARSE))
    if comm.rank == 0:
        net.save(folder / "first.keras")
    for begun in (0, 1):
        net, plain = model(seed=9), keras.optimizers.Adam(0.01)
        if comm.rank == 0:
            net = keras.models.load_model(folder / "first.keras")
            plain = net.optimizer
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(cx.DistributedOptimizer(plain, SPARSE), loss=loss, jit_compile=False)
        assert checkpoint.restore(net, folder) == begun
        assert fit(
            net,
            comm,
            epochs=begun + 1,
            initial_epoch=begun,
            extra=(checkpoint.Checkpoint(folder),),
        ).identical


class Relays(keras.optimizers.SGD):
    """As optimizers around others are written: the inner one takes the step."""

    def apply(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable] | None = None
    ) -> None:
        keras.optimizers.SGD(0.1).apply(grads, trainable_variables)


class StepsByItself(keras.optimizers.SGD):
    """Past Keras's own step; as all would go, if a later Keras called its parts by other names."""

    def _backend_apply_gradients(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable]
    ) -> None:
        for grad, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(0.1 * grad)


@pytest.mark.parametrize("eagerly", [False, True])
def test_an_optimizer_that_goes_past_the_exchange_is_refused(comm: Comm, eagerly: bool) -> None:
    each = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.1), {".*out.*": keras.optimizers.Adam()}
    )
    for optimizer in (keras.optimizers.MultiOptimizer(each), Relays(), StepsByItself()):
        net = compiled(cx.DistributedOptimizer(optimizer))
        net.run_eagerly = eagerly
        with pytest.raises(cx.PlanError, match="without an exchange"):
            fit(net, comm, epochs=1)


@pytest.mark.parametrize("traced", [False, True])
def test_residuals_move_on_when_layers_are_frozen_and_thawed(comm: Comm, traced: bool) -> None:
    """Residuals belong to variables: each weight gets all that was ever computed for it, whoever
    trains beside it.
    """
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
    steps(12, zeros[1:], variables[1:])
    assert list(optimizer.exchanger.all_residuals()) == ["base"]
    steps(12, zeros, variables)
    assert not optimizer.exchanger.all_residuals()
    for number, variable in enumerate(variables):
        total = sum(comm.gather_objects(gradients[number].numpy()))
        np.testing.assert_array_equal(variable.numpy(), -total)


@pytest.mark.parametrize("kind", [keras.optimizers.Adafactor, keras.optimizers.Nadam])
def test_a_built_optimizer_with_loss_scaling_is_copied_whole(comm: Comm, kind: type) -> None:
    def built() -> keras.optimizers.Optimizer:
        variables = [keras.Variable(np.ones(shape, np.float32)) for shape in ((12, 30), (30,))]
        optimizer = keras.optimizers.LossScaleOptimizer(kind(0.1))
        for _ in range(3):
            optimizer.apply(
                [tf.ones(variable.shape) * 2.0**15 for variable in variables], variables
            )
        return optimizer

    plain, wrapped = built(), cx.DistributedOptimizer(built())
    variables = plain._trainable_variables, wrapped._trainable_variables
    for optimizer, own in zip((plain, wrapped), variables, strict=True):
        optimizer.apply([tf.ones(variable.shape) * 2.0**15 for variable in own], own)
    for one, other in zip(*variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)


def test_parts_of_a_model_may_have_layers_of_the_same_name(comm: Comm, folder: Path) -> None:
    def part(name: str) -> keras.Model:
        layers = [
            keras.layers.Input((12,)),
            keras.layers.Dense(16, name="dense"),
            keras.layers.Dense(3, name="out"),
        ]
        return keras.Sequential(layers, name=name)

    def both() -> keras.Model:
        whole = keras.Input((12,))
        net = keras.Model(whole, part("one")(whole) + part("two")(whole), name="net")
        net.compile(
            cx.DistributedOptimizer(keras.optimizers.SGD(0.05), SPARSE), "mse", jit_compile=False
        )
        return net

    x = np.random.default_rng(comm.rank).normal(size=(16, 12)).astype(np.float32)
    net, again = both(), both()
    net.fit(
        x,
        x[:, :3],
        batch_size=8,
        verbose=0,
        callbacks=[callbacks.BroadcastState(), callbacks.CompareReplicas()],
    )
    (plan,) = [one.plan for one in net.optimizer.exchanger.runs.values()]
    named = {name for bucket in plan.buckets for name in bucket.variables}
    assert len(named) == 8 and {name.partition("#")[0] for name in named} == {
        variable.path for variable in net.trainable_variables
    }
    checkpoint.save(net, folder, 0)
    assert checkpoint.restore(again, folder) == 1
    for trained in (net, again):
        trained.fit(x, x[:, :3], batch_size=8, verbose=0, callbacks=[callbacks.BroadcastState()])
    for one, other in zip(weights(net), weights(again), strict=True):
        np.testing.assert_array_equal(one, other)
