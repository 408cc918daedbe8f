"""Metrics over ranks that looked right and were not.

Each epoch's results were averaged over the ranks, whatever they were: with 2,000 hard and 60 easy
samples to validate on, a loss of .628 was reported as .42, AUC and precision likewise; `Standard`
did not even do that, because Keras handed its parts a copy of the logs. horovod#444, #1095, #2897.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from users_metrics import Calibration, Largest, Smallest, Smoothed

import tfcommx as cx
from tfcommx.collectives.comm import Comm

K = keras.metrics
CLASSES = 4
# Rows of the ranks' shards: unequal, and no multiple of the batch
ROWS = (53, 9)
BATCH = 8


@pytest.fixture
def warned_about(caplog: pytest.LogCaptureFixture) -> Callable[[str], int]:
    """Return a function that counts the warnings that a metric is a mean of results."""
    return lambda name: sum(line.startswith(f"{name!r} is the mean") for line in caplog.messages)


@pytest.fixture(autouse=True)
def _two_ranks(comm: Comm) -> None:
    if comm.topology.size != 2:
        pytest.skip("the shards are those of two ranks")
    keras.utils.clear_session()  # Other tests made models on one rank alone: layers have numbers


def shard(rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, labels and weights of a rank: those of rank 1 are easier."""
    numbers = np.random.default_rng([3, rank])
    x = numbers.normal(size=(ROWS[rank], 6)).astype("float32")
    noise = (2.0, 0.1)[rank] * numbers.normal(size=(ROWS[rank], CLASSES))
    return (
        x,
        np.argmax(x[:, :CLASSES] + noise, axis=1).astype("int32"),
        numbers.uniform(0.2, 3, ROWS[rank]).astype("float32"),
    )


def everything() -> list[np.ndarray]:
    return [np.concatenate(parts) for parts in zip(*map(shard, range(2)), strict=True)]


def classifier(**options: Any) -> keras.Model:
    """Return a compiled model that no step changes."""
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES, "softmax")])
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.0)),
        **{"loss": "sparse_categorical_crossentropy", "jit_compile": False, **options},
    )
    return net


def same_steps() -> dict[str, Any]:
    """Return training data of equally many steps a rank; the last batches differ."""
    rows = (16, 11)[cx.rank()]
    x, y, _ = everything()
    first = (0, 16)[cx.rank()]
    return {"x": x[first : first + rows], "y": y[first : first + rows]}


def require_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert wanted.keys() <= got.keys(), (sorted(got), sorted(wanted))
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=3e-6, atol=1e-7, err_msg=name)


def last(comm: Comm, history: Any, prefix: str = "") -> dict[str, Any]:
    logs = {name: values[-1] for name, values in history.history.items()}
    everyone = comm.gather_objects(repr(sorted(logs.items())))
    assert everyone[0] == everyone[1], everyone
    return {
        name.removeprefix(prefix): value for name, value in logs.items() if name.startswith(prefix)
    }


@pytest.mark.extended
def test_the_metrics_of_keras_on_uneven_validation_shards(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen() -> list[K.Metric]:
        return [
            "accuracy",
            K.SparseTopKCategoricalAccuracy(2, name="top2"),
            K.SparseCategoricalCrossentropy(name="crossentropy"),
            K.MeanIoU(CLASSES, sparse_y_pred=False, name="iou"),
            Calibration(),
        ]

    net = classifier(metrics=chosen(), weighted_metrics=[K.SparseCategoricalAccuracy(name="right")])
    *data, weights = shard(comm.rank)
    history = net.fit(
        **same_steps(),
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        validation_data=(*data, weights),
        callbacks=[cx.callbacks.Standard()],
    )
    x, y, weights = everything()
    exact = net.evaluate(x, y, sample_weight=weights, batch_size=BATCH, verbose=0, return_dict=True)
    require_equal(last(comm, history, "val_"), exact)
    exact = net.evaluate(x[:27], y[:27], batch_size=BATCH, verbose=0, return_dict=True)
    require_equal(last(comm, history), exact)
    assert not caplog.messages


def binary(metrics: list[Any], **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.0)),
        "binary_crossentropy",
        metrics=metrics,
        jit_compile=False,
        **options,
    )
    return net


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    # Averaging reads the state of metrics, however it was computed; tracing so many takes long
    [{"run_eagerly": True}, case({}, kept=False), case({"steps_per_execution": 2}, kept=False)],
    ids=["eagerly", "traced", "two steps a call"],
)
def test_curves_and_ratios(
    comm: Comm, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    net = binary(
        [
            "accuracy",
            K.AUC(name="auc"),
            K.AUC(curve="PR", name="pr"),
            K.Precision(name="precision"),
            K.Recall(name="recall"),
            K.SensitivityAtSpecificity(0.5, name="sensitivity"),
            K.RecallAtPrecision(0.5, name="at_precision"),
            K.F1Score(name="f1"),
            K.RootMeanSquaredError(name="rmse"),
            K.R2Score(name="r2"),
            K.BinaryIoU(name="iou"),
            K.TruePositives(name="positives"),
            K.CosineSimilarity(name="cosine"),
            K.PearsonCorrelation(name="pearson", axis=0),
        ],
        **options,
    )
    mine = [(shard(rank)[0], (shard(rank)[1][:, None] > 1) * 1.0) for rank in range(2)]
    x, y = (np.concatenate(parts) for parts in zip(*mine, strict=True))
    history = net.fit(
        x[comm.rank :: 2][:16],
        y[comm.rank :: 2][:16],
        batch_size=BATCH,
        verbose=0,
        validation_data=mine[comm.rank],
        validation_batch_size=64,
        callbacks=[cx.callbacks.BroadcastState(), cx.callbacks.AverageMetrics()],
    )
    exact = net.evaluate(x, y, batch_size=64, verbose=0, return_dict=True)
    exact.pop("pearson")  # It is computed for each batch, and ranks have different ones
    require_equal(last(comm, history, "val_"), exact)
    assert not caplog.messages


@pytest.mark.exhaustive  # test_several_outputs has them in an evaluation
def test_metrics_that_are_no_sums_are_averaged_and_named(
    comm: Comm, warned_about: Callable[[str], int]
) -> None:
    net = classifier(metrics=[Largest(), Smoothed(), Smallest(), "accuracy"])
    x, y, _ = shard(comm.rank)
    history = net.fit(
        **same_steps(),
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        callbacks=[cx.callbacks.BroadcastState()],
    )
    own = net.evaluate(x, y, batch_size=32, verbose=0, return_dict=True)
    mean = np.mean(comm.gather_objects([own[name] for name in ("largest", "smallest")]), axis=0)
    got = last(comm, history, "val_")
    require_equal(got, {"largest": mean[0], "smallest": mean[1]})
    for name in ("val_largest", "val_smallest", "val_smoothed", "largest"):
        assert warned_about(name) == (comm.rank == 0)
    exact = net.evaluate(*everything()[:2], verbose=0, return_dict=True)
    require_equal(got, {"accuracy": exact["accuracy"], "loss": exact["loss"]})
    assert not warned_about("val_accuracy")


@pytest.mark.extended
def test_a_rank_that_validates_alone_stops_all(comm: Comm) -> None:
    net = classifier(metrics=["accuracy"])
    x, y, _ = everything()
    seen: dict[str, Any] = {}
    history = net.fit(
        **same_steps(),
        batch_size=BATCH,
        epochs=5,
        verbose=0,
        validation_data=(x, y) if comm.rank == 1 else None,
        callbacks=[
            cx.callbacks.BroadcastState(),
            keras.callbacks.EarlyStopping("val_loss", patience=1),
            keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.update(logs)),
        ],
    )
    assert len(history.epoch) == 2
    exact = net.evaluate(x, y, verbose=0, return_dict=True)
    require_equal(last(comm, history, "val_"), exact)
    assert seen == {name: values[-1] for name, values in history.history.items()}, seen
    exact = net.evaluate(x[:27], y[:27], verbose=0, return_dict=True)
    require_equal(last(comm, history), exact)


class OwnStep(keras.Model):
    """Returns its loss, and the result of a metric that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)
        self.entropy = K.Mean(name="entropy")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    @property
    def metrics(self) -> list[K.Metric]:
        return [self.entropy]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = tf.reduce_mean(losses)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.entropy.update_state(losses)
        return {"raw": loss, "entropy": self.entropy.result()}


@pytest.mark.extended
def test_a_training_step_that_returns_its_loss(
    comm: Comm, warned_about: Callable[[str], int]
) -> None:
    net = OwnStep()
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.0)), jit_compile=False)
    history = net.fit(
        **same_steps(),
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        callbacks=[cx.callbacks.BroadcastState()],
    )
    x, y, _ = everything()
    losses = keras.losses.sparse_categorical_crossentropy(y[:27], net(x[:27]), from_logits=True)
    require_equal(last(comm, history), {"entropy": np.mean(losses)})
    assert warned_about("raw") == (comm.rank == 0)
    assert not warned_about("entropy")


def test_another_evaluation_within_an_epoch_is_noticed(
    comm: Comm, warned_about: Callable[[str], int]
) -> None:
    net = classifier()
    x, y, _ = shard(comm.rank)
    data = same_steps()
    evaluate = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: net.evaluate(x, y, verbose=0)
    )
    callbacks = [evaluate, cx.callbacks.AverageMetrics()]
    history = net.fit(**data, batch_size=BATCH, verbose=0, callbacks=callbacks)
    own = comm.gather_objects(net.evaluate(**data, verbose=0))
    require_equal(last(comm, history), {"loss": np.mean(own)})
    assert warned_about("loss") == (comm.rank == 0)


@pytest.mark.extended
def test_several_outputs(comm: Comm, warned_about: Callable[[str], int]) -> None:
    keras.utils.set_random_seed(1)
    entry = keras.Input((6,))
    outputs = {
        "kind": keras.layers.Dense(CLASSES, "softmax", name="kind")(entry),
        "size": keras.layers.Dense(1, name="size", kernel_regularizer="l2")(entry),
    }
    net = keras.Model(entry, outputs)
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.0)),
        {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        metrics={
            "kind": ["accuracy", Largest(), Smallest(), Smoothed()],
            "size": [K.RootMeanSquaredError(name="rmse")],
        },
        jit_compile=False,
    )

    def named(x: np.ndarray, y: np.ndarray, _: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return x, {"kind": y, "size": x[:, :1] + y[:, None]}

    history = net.fit(
        *named(*(part[:8] for part in shard(comm.rank))),
        batch_size=BATCH,
        verbose=0,
        validation_data=named(*shard(comm.rank)),
        callbacks=[cx.callbacks.BroadcastState()],
    )
    exact = net.evaluate(*named(*everything()), verbose=0, return_dict=True)
    no_sums = [name for name in exact if name.endswith(("largest", "smallest", "smoothed"))]
    assert len(no_sums) == 3
    for name in no_sums:
        del exact[name]
    # Keras counts batches for these, not samples
    of_batches = {name: exact.pop(name) for name in ("kind_loss", "size_loss")}
    got = last(comm, history, "val_")
    require_equal(got, exact)
    batches = [
        net.evaluate(
            x[first : first + BATCH],
            {name: part[first : first + BATCH] for name, part in y.items()},
            verbose=0,
            return_dict=True,
        )
        for x, y in (named(*shard(rank)) for rank in range(2))
        for first in range(0, len(x), BATCH)
    ]
    require_equal(got, {name: np.mean([one[name] for one in batches]) for name in of_batches})
    for name in no_sums:
        assert warned_about(f"val_{name}") == (comm.rank == 0)


def test_results_after_evaluate_and_in_a_loop_of_one_s_own(
    comm: Comm, warned_about: Callable[[str], int]
) -> None:
    net = classifier(metrics=["accuracy", Calibration()])
    exact = net.evaluate(*everything()[:2], verbose=0, return_dict=True)
    net.evaluate(*shard(comm.rank)[:2], verbose=0)
    for _ in range(2):  # The metrics stay as they are
        require_equal(cx.metrics_over_ranks(net), exact)
    auc, loss, largest = K.AUC(name="auc"), K.Mean(name="loss"), Largest()
    for rank in (range(2), [comm.rank]):
        for metric in (auc, loss, largest):
            metric.reset_state()
        for x, y, weights in map(shard, rank):
            auc.update_state(y > 1, 1 / (1 + np.exp(-x[:, 0])))
            loss.update_state(x[:, 1] ** 2, sample_weight=weights)
            largest.update_state(y, x)
        if len(list(rank)) == 2:
            exact = {"auc": auc.result(), "loss": loss.result()}
    own = comm.gather_objects(float(largest.result()))
    got = cx.metrics_over_ranks(iter([auc, loss, largest]))
    require_equal(got, {**exact, "largest": np.mean(own)})
    assert comm.gather_objects(got) == [got] * 2
    assert warned_about("largest") == (comm.rank == 0)
    assert cx.metrics_over_ranks([]) == {}


def test_counts_beyond_their_dtypes(comm: Comm, warned_about: Callable[[str], int]) -> None:
    words = K.Sum(name="words", dtype="int32")
    words.total.assign(1_500_000_000)
    require_equal(cx.metrics_over_ranks([words]), {"words": 1_500_000_000})
    assert warned_about("words") == (comm.rank == 0)
    many, half = K.Mean(name="many"), K.Mean(name="half", dtype="float16")
    many.count.assign(2.0**24 - comm.rank)
    many.total.assign(2.0**25 + 2)
    half.count.assign(100)
    half.total.assign([60_000, 50_000][comm.rank])
    got = cx.metrics_over_ranks([many, half])
    require_equal(got, {"many": (2**26 + 4) / (2**25 - 1), "half": 550})
    assert warned_about("half") == (comm.rank == 0)
    assert not warned_about("many")
    sums = K.Sum(name="sum")
    sums.update_state([np.nan if comm.rank else 1.0])
    assert np.isnan(cx.metrics_over_ranks([sums])["sum"])
