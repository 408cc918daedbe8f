"""Callbacks on ranks that are unlike each other.

Unbuilt models, odd metrics, a rank that stops, validates or begins alone.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import SPARSE, weights

import tfcommx as cx
from tfcommx import callbacks, checkpoint
from tfcommx.collectives.comm import Comm
from tfcommx.optim.broadcast import SEED_STEP
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.callbacks import SetLearningRate
from tfcommx.training.steps import FitCall, StepCounter


class Subclassed(keras.Model):
    def __init__(self, middle: keras.layers.Layer | None = None) -> None:
        super().__init__()
        self.middle, self.out = middle or keras.layers.Dense(8), keras.layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.out(self.middle(x))


def built_backbone() -> keras.Model:
    return Subclassed(keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(8)]))


def unbuilt() -> keras.Model:
    return keras.Sequential(
        [keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    )


def data(rows: int = 32) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(7)
    return numbers.normal(size=(rows, 12)).astype("float32"), numbers.normal(size=(rows, 3)).astype(
        "float32"
    )


def small(**options: Any) -> keras.Model:
    net = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(3)])
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        **{"loss": "mse", "jit_compile": False, **options},
    )
    return net


@pytest.mark.extended
@pytest.mark.parametrize(
    ("make", "options", "rows"),
    [
        case(Subclassed, {}, 32, kept=False),
        (built_backbone, {}, 32),
        case(unbuilt, {"steps_per_execution": 2}, 32, kept=False),
        case(unbuilt, {}, 8, kept=False),
        case(unbuilt, {"run_eagerly": True}, 16, kept=False),
    ],
    ids=["subclassed", "backbone", "two steps a call", "one call an epoch", "eagerly"],
)
def test_models_that_are_built_by_the_first_step(
    comm: Comm, make: Any, options: dict[str, Any], rows: int
) -> None:
    keras.utils.set_random_seed(comm.rank)
    net = make()
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.Adam(0.01), SPARSE),
        loss="mse",
        jit_compile=False,
        **options,
    )
    x, y = data(rows)
    for _ in range(2):  # the second time all is built
        net.fit(
            x,
            y,
            batch_size=8,
            verbose=0,
            shuffle=False,
            callbacks=[callbacks.BroadcastState(), callbacks.CompareReplicas()],
        )
    state = [variable.numpy().tobytes() for variable in (*net.weights, *net.optimizer.variables)]
    assert (
        len(net.optimizer.variables) > 8
        and comm.gather_objects(state) == [state] * comm.topology.size
    )


@pytest.mark.extended
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
        pytest.skip("takes several ranks")
    unequal = [
        (3 - comm.rank, 0, r"\[3, 2.*`epochs`"),
        (3, min(comm.rank, 1), r"\[0, 1.*`initial_epoch`"),
        (3, 0 if comm.rank else 3, r"\[None, 0.*`initial_epoch`"),
    ]
    for epochs, first, received in unequal:
        with pytest.raises(cx.ConfigurationError, match=received):
            small().fit(
                *data(8),
                epochs=epochs,
                initial_epoch=first,
                verbose=0,
                callbacks=[callbacks.BroadcastState()],
            )


@pytest.mark.parametrize(
    ("every", "steps"), [case(1, 2, kept=False), (3, 3), case(9, 4, kept=False)]
)
def test_all_ranks_stop_at_the_same_step(comm: Comm, every: int, steps: int) -> None:
    """The last rank meets a NaN in its second step.

    With every=9 the epoch's end, after 4 steps, comes first.
    """
    last, net, seen = comm.rank == comm.topology.size - 1, small(), []

    class Alone(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if last and batch == 1:
                self.model.stop_training = True

    net.fit(
        *data(),
        batch_size=8,
        epochs=3,
        verbose=0,
        callbacks=[callbacks.BroadcastState(), Alone(), callbacks.AgreeOnStop(every)],
    )
    assert seen == list(range(steps)) and net.stop_training


@pytest.mark.extended
def test_keras_callbacks_that_stop_one_rank(comm: Comm) -> None:
    last = comm.rank == comm.topology.size - 1
    x, y = data()
    bad = np.where(last & (np.arange(32)[:, None] == 20), np.nan, x)
    net = small()
    net.fit(
        bad,
        y,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            callbacks.BroadcastState(),
            keras.callbacks.TerminateOnNaN(),
            callbacks.AgreeOnStop(),
        ],
    )
    assert int(net.optimizer.iterations) == 3  # the loss of the last rank alone was NaN
    net = small()
    # Of a loss that falls
    early = [keras.callbacks.EarlyStopping("loss", mode="max", patience=0)] if last else []
    net.fit(
        x,
        y,
        batch_size=8,
        epochs=9,
        verbose=0,
        callbacks=[callbacks.BroadcastState(), *early, callbacks.AgreeOnStop()],
    )
    assert len(net.history.history["loss"]) == 2
    with pytest.raises(cx.ConfigurationError, match=r"`every`.*\b0\b"):
        callbacks.AgreeOnStop(0)


@pytest.mark.extended
@pytest.mark.parametrize("chief_alone", [case(True, kept=False), False])
def test_what_is_validated_is_the_average_whoever_validates(comm: Comm, chief_alone: bool) -> None:
    x, y = data()
    net = keras.Sequential(
        [
            keras.layers.Input((12,)),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(3),
        ]
    )
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    means: list[bytes] = []

    class Watch(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            means.append(net.get_layer("norm").moving_mean.numpy().tobytes())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            means.append(net.get_layer("norm").moving_mean.numpy().tobytes())

    more = {} if chief_alone and comm.rank else {"validation_data": (x, y)}
    net.fit(
        x + comm.rank,
        y,
        batch_size=8,
        epochs=2,
        verbose=0,
        shuffle=False,
        **more,
        callbacks=[
            callbacks.BroadcastState(),
            callbacks.AverageMetrics(),
            callbacks.AverageBatchNorm(),
            Watch(),
        ],
    )
    assert len(means) == (4 if more else 2) and len(set(means)) == 2  # after an epoch it stays
    assert len({tuple(dict.fromkeys(theirs)) for theirs in comm.gather_objects(means)}) == 1


def test_an_epoch_of_unknown_length_is_averaged_at_its_end(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    net = keras.Sequential(
        [
            keras.layers.Input((12,)),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(3),
        ]
    )
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    x, y = data()
    unknown = (
        tf.data.Dataset.from_tensor_slices((x + comm.rank, y)).batch(8).filter(lambda *_: True)
    )
    net.fit(
        unknown, verbose=0, callbacks=[callbacks.BroadcastState(), callbacks.AverageBatchNorm()]
    )
    mean = net.get_layer("norm").moving_mean.numpy().tobytes()
    assert comm.gather_objects(mean) == [mean] * comm.topology.size


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_averages_keep_every_bit_and_leave_alone_what_is_trained(comm: Comm, dtype: str) -> None:
    keras.utils.set_random_seed(0)
    frozen = keras.layers.Dense(5, trainable=False, dtype=dtype, name="frozen")
    net = keras.Sequential(
        [
            keras.layers.Input((12,)),
            frozen,
            keras.layers.BatchNormalization(dtype=dtype, name="norm"),
        ]
    )
    net.compile(metrics=[metric := keras.metrics.Mean()], loss="mse")
    mean, variance = net.get_layer("norm").moving_mean, net.get_layer("norm").moving_variance
    mean.assign(np.full(5, 0.1 + comm.rank))  # 0.1 has more bits than float32
    variance.assign(np.full(5, 0.1))
    frozen.kernel.assign_add(tf.fill(frozen.kernel.shape, tf.cast(comm.rank, dtype)))
    metric.total.assign(before := float(comm.rank))
    kernel = frozen.kernel.numpy()
    digits = 1e-7 if dtype == "float32" else 1e-15
    average = callbacks.AverageBatchNorm()
    average.set_model(net)
    average.on_epoch_end(0)
    np.testing.assert_allclose(mean.numpy(), 0.1 + (comm.topology.size - 1) / 2, rtol=digits)
    np.testing.assert_allclose(
        variance.numpy(), np.asarray(0.1, dtype), rtol=0 if dtype == "float32" else digits
    )
    np.testing.assert_array_equal(frozen.kernel.numpy(), kernel)
    assert float(metric.total.numpy()) == before


def test_metrics_of_several_numbers(comm: Comm) -> None:
    logs = {"loss": float(comm.rank), "f1": np.float32([comm.rank, 1]), "note": "text"}
    callbacks.AverageMetrics().on_epoch_end(0, logs)
    middle = (comm.topology.size - 1) / 2
    assert logs.pop("f1").tolist() == [middle, 1] and logs == {"loss": middle, "note": "text"}


class Rates(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(self.model.optimizer.learning_rate))


@pytest.mark.one_rank
@pytest.mark.parametrize("scaled", [case(False, kept=False), True])
def test_the_warm_up_counts_steps_not_calls(comm: Comm, scaled: bool) -> None:
    net = small(steps_per_execution=2)
    if scaled:
        net.compile(
            cx.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
            loss="mse",
            jit_compile=False,
            steps_per_execution=2,
        )
    rates = Rates()
    x, y = data(64)
    net.fit(
        x,
        y,
        batch_size=8,
        verbose=0,
        callbacks=[callbacks.BroadcastState(), callbacks.WarmUp(0.4, 3, 0.0), rates],
    )
    np.testing.assert_allclose(rates.seen, [0, 0.4 * 2 / 3, 0.4, 0.4], rtol=1e-6)
    net.optimizer.learning_rate = 0.05  # as a schedule that lowers it
    net.fit(
        x,
        y,
        batch_size=8,
        verbose=0,
        callbacks=[callbacks.BroadcastState(), callbacks.WarmUp(0.4, 3, 0.0), rates],
    )
    np.testing.assert_allclose(rates.seen, 0.05)


@pytest.mark.one_rank
def test_a_warm_up_that_ends_with_an_epoch_ends_with_the_full_rate(comm: Comm) -> None:
    """A file saved then, or a second `fit`, continued with the rate of the warm-up's last step."""
    net, rates, (x, y) = small(), Rates(), data(32)

    def fit_epochs(first: int, *more: keras.callbacks.Callback) -> list[float]:
        rates.seen = []
        added = [callbacks.BroadcastState(), callbacks.WarmUp(0.4, 4, 0.0), *more, rates]
        net.fit(x, y, batch_size=8, verbose=0, initial_epoch=first, epochs=2, callbacks=added)
        return rates.seen

    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))
    np.testing.assert_allclose(fit_epochs(0, halved), [0, 0.1, 0.2, 0.3, *[0.2] * 4], rtol=1e-6)
    # As of a file that a callback before WarmUp has saved
    net.optimizer.iterations.assign(4)
    net.optimizer.learning_rate = 0.3
    np.testing.assert_allclose(fit_epochs(1), [0.4] * 4, rtol=1e-6)
    np.testing.assert_allclose(fit_epochs(1), [0.4] * 4, rtol=1e-6)


@pytest.mark.one_rank
def test_a_recipes_rate_counts_steps_not_calls(comm: Comm) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "rates",
            "batch_per_rank": 8,
            "phases": [{"epochs": 3, "resolution": 8}],
            "learning_rate": {"peak": 0.4, "warm_up_epochs": 1, "decay": "linear"},
        }
    )
    net, rates, counter = small(steps_per_execution=2), Rates(), StepCounter()
    run = SimpleNamespace(recipe=recipe, steps=(8,), comm=comm)
    counter.begin(FitCall(0, range(1, 3)), 8)
    x, y = data(64)
    context = SimpleNamespace(run=run, counter=counter)
    listed = [callbacks.BroadcastState(), counter, SetLearningRate(context), rates]
    net.fit(x, y, batch_size=8, epochs=3, initial_epoch=1, verbose=0, callbacks=listed)
    wanted = [
        recipe.learning_rate.at(step, 8, 24, 8 * comm.topology.size) for step in range(8, 24, 2)
    ]
    np.testing.assert_allclose(rates.seen, wanted, rtol=1e-6)


@pytest.mark.extended
def test_draws_without_a_seed_are_a_rank_s_own(comm: Comm, folder: Path) -> None:
    """A layer's `keras.random.normal(shape)` added the same noise on all ranks.

    Keras's own generator serves such draws, which `set_random_seed` makes equal on all ranks.
    """

    class Noise(keras.layers.Layer):
        def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
            noise = keras.random.normal(keras.ops.shape(inputs)) if training else 0.0
            return inputs + noise

    def train(epochs: int, first: int = 0) -> np.ndarray:
        keras.utils.set_random_seed(3)
        net = keras.Sequential([keras.layers.Input((12,)), Noise(), keras.layers.Dense(3)])
        net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
        assert not first or checkpoint.restore(net, folder) == first
        net.fit(
            np.zeros((16, 12)),
            np.zeros((16, 3)),
            batch_size=8,
            epochs=epochs,
            initial_epoch=first,
            verbose=0,
            callbacks=[callbacks.BroadcastState(), checkpoint.Checkpoint(folder)],
        )
        return keras.random.normal((4,)).numpy()

    draws = comm.gather_objects(train(epochs=2).tolist())
    train(epochs=1)
    resumed = comm.gather_objects(train(epochs=2, first=1).tolist())
    # Others derive their seeds from rank 0's again
    assert resumed[0] == draws[0]
    assert len(set(map(tuple, draws))) == len(set(map(tuple, resumed))) == comm.topology.size


@pytest.mark.exhaustive  # test_checkpoints.py has it with a resume
def test_ranks_drop_entries_of_their_own(comm: Comm) -> None:
    keras.utils.set_random_seed(3)
    net = keras.Sequential(
        [keras.layers.Input((12,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    )
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    for _ in range(2):  # the second time as the first: from rank 0's
        net.fit(
            np.zeros((16, 12)),
            np.zeros((16, 3)),
            batch_size=8,
            verbose=0,
            callbacks=[callbacks.BroadcastState()],
        )
    states = comm.gather_objects(net.layers[0].seed_generator.state.numpy().tolist())
    assert [seed for seed, _ in states] == [
        (states[0][0] + rank * SEED_STEP) % 2**31 for rank in range(len(states))
    ]
    assert {count for _, count in states} == {4}
