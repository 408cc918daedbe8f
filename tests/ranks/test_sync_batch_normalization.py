"""SyncBatchNormalization equals batch normalization of one process that has the joint batch."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import same_on_all_ranks

import tfcommx as cx
from tfcommx.collectives.comm import Comm

SHAPE = (5, 5, 3)


def rows_of(rank: int) -> int:
    """Return how many rows a rank has: unequal numbers."""
    return 4 + 2 * rank


def batch(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of a rank, with channels of large and unequal means, and labels."""
    numbers = np.random.default_rng([3, rank])
    means = np.array([0.0, 30.0, -5.0])
    pictures = numbers.normal(means + rank, 1.0 + rank, (rows_of(rank), *SHAPE))
    return pictures.astype("float32"), numbers.integers(0, 4, rows_of(rank))


def joint(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the batches of all ranks, one after the other."""
    pictures, labels = zip(*(batch(rank) for rank in range(size)), strict=True)
    return np.concatenate(pictures), np.concatenate(labels)


def network(norm: type[keras.layers.Layer], **options: object) -> keras.Model:
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.layers.Input(SHAPE),
            keras.layers.Conv2D(3, 3, name="below"),
            norm(momentum=0.5, name="norm", **options),
            keras.layers.Conv2D(2, 2, activation="relu"),
            norm(momentum=0.5, name="second", **options),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )


def loss_sum(net: keras.Model, pictures: tf.Tensor, labels: tf.Tensor) -> tuple:
    """Return outputs, and gradients of the sum of the losses."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    with tf.GradientTape() as tape:
        outputs = net(pictures, training=True)
        loss = loss_of(labels, outputs)
    return outputs, tape.gradient(loss, net.trainable_variables)


@pytest.mark.parametrize(
    ("traced", "renorm"),
    [(True, False), case(True, True, kept=False), case(False, False, kept=False)],
)
def test_equal_to_one_process_with_the_joint_batch(comm: Comm, traced: bool, renorm: bool) -> None:
    size = comm.topology.size
    options = {"renorm": True} if renorm else {}  # Keras 3.13 has none
    ours = network(cx.layers.SyncBatchNormalization, **options)
    one = network(keras.layers.BatchNormalization, **options)
    one.set_weights(ours.get_weights())
    outputs, gradients = loss_sum(one, *joint(size))
    step = tf.function(loss_sum) if traced else loss_sum
    mine, own = step(ours, *map(tf.constant, batch(comm.rank)))
    start = sum(map(rows_of, range(comm.rank)))
    expected = outputs.numpy()[start : start + rows_of(comm.rank)]
    np.testing.assert_allclose(mine.numpy(), expected, rtol=2e-4, atol=2e-4)
    for number, (gradient, variable) in enumerate(zip(own, ours.trainable_variables, strict=True)):
        total = comm.allreduce(gradient, "world", f"total{number}").numpy()
        wanted = gradients[number].numpy()
        near = 1e-3 * max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(total, wanted, rtol=1e-3, atol=near, err_msg=variable.path)
    for variable, other in zip(
        ours.non_trainable_variables, one.non_trainable_variables, strict=True
    ):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)
        everyone = comm.gather_objects(variable.numpy().tobytes())
        assert len(set(everyone)) == 1, variable.path


def test_masked_entries_do_not_count(comm: Comm) -> None:
    """A mask hides some entries of one rank and all of another; `axis` may be any."""
    size = comm.topology.size
    values = np.random.default_rng(1).normal(3, 2, (size, 4, 6, 3)).astype("float32")
    shown = np.random.default_rng(2).random((size, 4, 6)) < 0.6
    shown[-1] = size == 1
    ours = cx.layers.SyncBatchNormalization()
    one = keras.layers.BatchNormalization()
    whole = one(values.reshape(-1, 6, 3), training=True, mask=shown.reshape(-1, 6))
    with tf.GradientTape() as tape:
        inputs = tf.constant(values[comm.rank])
        tape.watch(inputs)
        outputs = ours(inputs, training=True, mask=shown[comm.rank])
        loss = tf.reduce_sum(outputs**3)
    with tf.GradientTape() as joint_tape:
        inputs_of_all = tf.constant(values.reshape(-1, 6, 3))
        joint_tape.watch(inputs_of_all)
        whole_loss = tf.reduce_sum(
            one(inputs_of_all, training=True, mask=shown.reshape(-1, 6)) ** 3
        )
    np.testing.assert_allclose(
        outputs, whole.numpy().reshape(size, 4, 6, 3)[comm.rank], rtol=1e-3, atol=1e-4
    )
    wanted = joint_tape.gradient(whole_loss, inputs_of_all).numpy()
    np.testing.assert_allclose(
        tape.gradient(loss, inputs), wanted.reshape(size, 4, 6, 3)[comm.rank], rtol=1e-2, atol=1e-2
    )


def test_a_rank_may_have_no_rows(comm: Comm) -> None:
    """As of a layer for regions of pictures, which found none in those of a rank.

    The other ranks had NaN in their outputs and moving averages.
    """
    size = comm.topology.size
    values = np.random.default_rng(1).normal(3, 2, (size, 4, 3)).astype("float32")
    if size > 1:
        values = values[:-1]
    ours = cx.layers.SyncBatchNormalization()
    one = keras.layers.BatchNormalization()
    own = values[comm.rank] if comm.rank < len(values) else values[:0].reshape(0, 3)

    def loss_and_gradient(layer: keras.layers.Layer, rows: np.ndarray) -> tuple:
        inputs = tf.constant(rows)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True)
            loss = tf.reduce_sum(outputs**3)
        return outputs.numpy(), tape.gradient(loss, inputs).numpy()

    found = loss_and_gradient(ours, own)
    expected = loss_and_gradient(one, values.reshape(-1, 3))
    for part, whole in zip(found, expected, strict=True):
        wanted = whole[4 * comm.rank : 4 * comm.rank + 4]
        np.testing.assert_allclose(part, wanted, rtol=1e-3, atol=1e-3)
    for variable, other in zip(ours.weights, one.weights, strict=True):
        np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", case("mixed_float16", kept=False)])
def test_inputs_of_16_bits(comm: Comm, dtype: str) -> None:
    """Statistics are of float32: float16 cannot hold the square of 300."""
    values = np.random.default_rng(comm.rank).normal(300, 1, (32, 2)).astype("float32")
    layer = cx.layers.SyncBatchNormalization(dtype=dtype)
    outputs = layer(tf.cast(values, layer.compute_dtype), training=True)
    assert outputs.dtype == layer.compute_dtype
    every = tf.cast(comm.all_gather(tf.cast(outputs, tf.float32), "world", "outputs"), tf.float64)
    np.testing.assert_allclose(tf.reduce_mean(every, 0), 0, atol=0.02)
    if dtype != "bfloat16":  # Which holds 300 to +-1
        np.testing.assert_allclose(tf.math.reduce_std(every, 0), 1, atol=0.05)


def test_a_channel_with_a_large_mean_keeps_its_variance(comm: Comm) -> None:
    values = np.random.default_rng(comm.rank).normal(1e4, 1, (512, 1)).astype("float32")
    layer = cx.layers.SyncBatchNormalization(momentum=0.0)
    layer(values, training=True)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 1, rtol=0.2)


@pytest.mark.extended
def test_in_fit_beside_the_exchange(comm: Comm) -> None:
    """Two layers and a shared one; replicas stay equal; evaluation exchanges nothing."""
    keras.utils.set_random_seed(2)
    inputs = keras.layers.Input((6,))
    shared = cx.layers.SyncBatchNormalization(name="shared")
    dense = keras.layers.Dense(6, name="below")
    left, right = shared(dense(inputs)), shared(dense(inputs * 2))
    both = cx.layers.SyncBatchNormalization()(left + right)
    net = keras.Model(inputs, keras.layers.Dense(3)(both))
    # Messages hold one of TensorFlow's threads each while they wait.
    sparse = cx.Scheme("allgather", "mstopk", 0.3, dense_below=8)
    scheme = cx.Scheme("pipeline") if comm.messages.possible else sparse
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme), loss="mse", jit_compile=False
    )
    x = np.random.default_rng(comm.rank).normal(size=(32, 6)).astype("float32")
    net.fit(
        x, x[:, :3], batch_size=8, epochs=2, verbose=0, callbacks=[cx.callbacks.BroadcastState()]
    )
    assert same_on_all_ranks(comm, net)
    everyone = comm.gather_objects([one.numpy().tobytes() for one in net.non_trainable_variables])
    assert all(theirs == everyone[0] for theirs in everyone)
    if comm.rank == 0:  # Alone: it would wait forever for an exchange
        net.evaluate(x, x[:, :3], verbose=0)


@pytest.mark.one_rank
def test_a_saved_model_has_it(comm: Comm, tmp_path: Path) -> None:
    net = keras.Sequential([keras.layers.Input((6,)), cx.layers.SyncBatchNormalization(name="it")])
    net.get_layer("it").moving_mean.assign(np.arange(6.0))
    net.save(tmp_path / "net.keras")
    loaded, x = keras.models.load_model(tmp_path / "net.keras"), np.ones((4, 6))
    assert isinstance(loaded.get_layer("it"), cx.layers.SyncBatchNormalization)
    np.testing.assert_array_equal(loaded(x), net(x))


def test_refused_where_ranks_take_steps_of_their_own(comm: Comm) -> None:
    net = network(cx.layers.SyncBatchNormalization)
    strategy = cx.strategies.ElasticAveraging(every=2)
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy=strategy),
        loss="mse",
        jit_compile=False,
    )
    with pytest.raises(cx.ConfigurationError, match=r"norm, .*/second\)"):
        net.fit(*batch(0), verbose=0, callbacks=[cx.callbacks.BroadcastState()])


@pytest.mark.extended
def test_the_layer_of_keras_that_knows_no_ranks_is_named(
    comm: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """BatchNormalization(synchronized=True) normalized by the batch of its rank, without a word."""
    net = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.BatchNormalization(synchronized=True, name="theirs"),
            cx.layers.SyncBatchNormalization(name="ours"),
            keras.layers.Dense(1),
        ]
    )
    plain = keras.optimizers.SGD(0.1)
    net.compile(cx.DistributedOptimizer(plain, cx.Scheme()), "mse", jit_compile=False)
    ones = np.ones((8, 4), "float32")
    net.fit(ones, ones[:, :1], verbose=0, callbacks=[cx.callbacks.BroadcastState()])
    told = [text for record in caplog.records if "not the ranks" in (text := record.getMessage())]
    assert len(told) == (comm.rank == 0)
    assert all("theirs normalize" in text and "ours" not in text for text in told)
