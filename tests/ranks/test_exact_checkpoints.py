"""A restored model equals the saved one, to the bit, or is refused; moving averages are equal.

Keras saves a layer with LoRA as its kernel with the adapters added, and loads adapters of zeros.
After a resume both adapters were zero, so were their gradients, and the loss did not change
(.04162), without a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import compiled, fit

import tfcommx as cx
from tfcommx import callbacks, checkpoint
from tfcommx.collectives.comm import Comm

layers = keras.layers


class Forgets(layers.Dense):
    """A layer whose loaded bias differs from the saved one."""

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(store)
        self.bias.assign(0 * self.bias)


def dense() -> list[keras.layers.Layer]:
    return [keras.Input((8,)), layers.Dense(6, "tanh", name="big"), layers.Dense(1)]


def embedded() -> list[keras.layers.Layer]:
    return [
        keras.Input((8,)),
        layers.Lambda(lambda x: tf.cast(tf.abs(x), tf.int32) % 5),
        layers.Embedding(5, 4, name="big"),
        layers.Flatten(),
        layers.Dense(1),
    ]


def convolved() -> list[keras.layers.Layer]:
    return [
        keras.Input((8,)),
        layers.Reshape((4, 2)),
        layers.Conv1D(3, 2, name="big"),
        layers.Flatten(),
        layers.Dense(1),
    ]


def multiplied() -> list[keras.layers.Layer]:
    return [keras.Input((8,)), layers.EinsumDense("ab,bc->ac", (6,), name="big"), layers.Dense(1)]


def forgetting() -> list[keras.layers.Layer]:
    return [keras.Input((8,)), Forgets(6, "tanh", name="big"), layers.Dense(1)]


def built(
    stack: Callable[[], list[keras.layers.Layer]], lora: bool, mode: str | None
) -> keras.Model:
    keras.utils.set_random_seed(1)
    net = keras.Sequential(stack())
    if mode:
        net.get_layer("big").quantize(mode)
    if lora:
        net.get_layer("big").enable_lora(2)
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.3), cx.Scheme()), "mse", jit_compile=False
    )
    return net


def losses(net: keras.Model, first: int, last: int, *more: Any) -> list[float]:
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    y = np.tanh(x[:, :1] - x[:, 1:2])
    done = net.fit(
        x,
        y,
        batch_size=16,
        initial_epoch=first,
        epochs=last,
        shuffle=False,
        verbose=0,
        callbacks=[callbacks.BroadcastState(), *more],
    )
    return done.history["loss"]


@pytest.mark.extended
@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("stack", "lora", "mode"),
    [
        case(dense, True, None, kept=False),
        case(embedded, True, None, kept=False),
        case(convolved, True, None, kept=False),
        case(multiplied, True, None, kept=False),
        case(dense, False, "int8", kept=False),
        case(dense, True, "int8", kept=False),
        case(embedded, True, "int8", kept=False),
        (dense, True, "int4"),
        (forgetting, False, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_layer_that_keras_saves_otherwise_is_restored_exactly(
    comm: Comm,
    folder: Path,
    stack: Callable[[], list[keras.layers.Layer]],
    lora: bool,
    mode: str | None,
) -> None:
    """Keras calls the second model of the process sequential_1: it was refused for its names."""
    net = built(stack, lora, mode)
    losses(net, 0, 1, checkpoint.Checkpoint(folder))
    again = built(stack, lora, mode)
    assert checkpoint.restore(again, folder) == 1
    for one, other in zip(net.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), other.path)
    before, after = losses(net, 1, 3), losses(again, 1, 3)
    assert before == after and before[0] != before[1]


@pytest.mark.one_rank
def test_a_model_that_cannot_hold_what_was_saved_is_refused(comm: Comm, folder: Path) -> None:
    """Keras warns, and trains on with the state of a new optimizer, or rounds the weights."""

    def made(dtype: str = "float32") -> keras.Model:
        keras.utils.set_random_seed(1)
        net = keras.Sequential([keras.Input((8,)), layers.Dense(1, dtype=dtype, name="out")])
        wrapped = cx.DistributedOptimizer(keras.optimizers.Adam(0.1), cx.Scheme())
        net.compile(wrapped, "mse", jit_compile=False)
        return net

    net = made()
    net.optimizer.build(net.trainable_variables)
    checkpoint.save(net, folder, 0)
    with pytest.raises(cx.CheckpointError, match=r"out/kernel'.*bfloat16\[8, 1\]"):
        checkpoint.restore(made("bfloat16"), folder)
    checkpoint.restore(made(), folder)


@pytest.mark.one_rank
def test_a_vocabulary_is_restored_or_refused(comm: Comm, folder: Path) -> None:
    def made(*words: str) -> keras.Model:
        lookup = layers.StringLookup(name="words")
        lookup.adapt(list(words))
        net = keras.Sequential(
            [keras.Input((1,), dtype="string"), lookup, layers.Embedding(4, 1), layers.Flatten()]
        )
        wrapped = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), cx.Scheme())
        net.compile(wrapped, "mse", jit_compile=False)
        return net

    net = made("a", "b", "b")
    checkpoint.save(net, folder, 0)
    checkpoint.restore(made("a", "b", "b"), folder)
    with pytest.raises(cx.CheckpointError, match=r"\(words\)"):
        checkpoint.restore(made("a", "a", "b"), folder)


AVERAGES = {
    "ema": {},
    "ema of updates": {"sends": "updates"},
    "ema of overlapped rounds": {"overlap": 2},
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [case(name, kept=name == "ema of overlapped rounds") for name in AVERAGES]
)
def test_moving_averages_are_averaged_with_the_weights(comm: Comm, name: str) -> None:
    """`fit` ended with each rank's own moving average: replicas differed by .07."""
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    plain = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9)
    averaging = cx.strategies.WeightAveraging(every=4, **AVERAGES[name])
    net.compile(
        cx.DistributedOptimizer(plain, cx.Scheme(), strategy=averaging), "mse", jit_compile=False
    )
    x = np.random.default_rng(comm.rank).normal(comm.rank, 1, (88, 4)).astype("float32")
    compare = callbacks.CompareReplicas()
    averages: list[np.ndarray] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            averages.append(net.optimizer._model_variables_moving_average[0].numpy())

    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    net.fit(
        x,
        x.sum(1) + comm.rank,
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_data=(x, x.sum(1)),
        callbacks=[callbacks.BroadcastState(), Watch(), swap, compare],
    )
    everyone = comm.gather_objects((net.get_weights(), averages))
    for kernels, seen in everyone:
        np.testing.assert_array_equal(kernels[0], everyone[0][0][0])
        np.testing.assert_array_equal(seen, everyone[0][1])
    np.testing.assert_array_equal(averages[-1], net.get_weights()[0])


@pytest.mark.one_rank
def test_averages_that_replace_weights_are_refused_with_weight_averaging(comm: Comm) -> None:
    plain = keras.optimizers.SGD(0.01, use_ema=True, ema_overwrite_frequency=3)
    with pytest.raises(cx.ConfigurationError, match="ema_overwrite_frequency=3"):
        cx.DistributedOptimizer(plain, strategy="weight_averaging")


SCHEDULE_FREE = pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="Keras before 3.14 has none"
)


@SCHEDULE_FREE
@pytest.mark.one_rank
def test_weights_that_an_optimizer_keeps_as_momentum_are_not_reset(comm: Comm) -> None:
    """ScheduleFreeAdamW mixes them into the weights: a reset moved these towards zero."""
    plain = keras.optimizers.ScheduleFreeAdamW(0.01)
    reset = cx.strategies.WeightAveraging(every=2, momentum="reset")
    with pytest.raises(cx.ConfigurationError, match=r"reset.*average"):
        cx.DistributedOptimizer(plain, strategy=reset)


@SCHEDULE_FREE
@pytest.mark.exhaustive  # test_weight_averaging.py averages momenta
def test_weights_that_an_optimizer_keeps_as_momentum_are_averaged(comm: Comm) -> None:
    plain = keras.optimizers.ScheduleFreeAdamW(0.01)
    average = cx.strategies.WeightAveraging(every=2, momentum="average")
    net = compiled(cx.DistributedOptimizer(plain, strategy=average), seed=comm.rank)
    assert fit(net, comm, epochs=1).identical
    state = [part.numpy() for part in net.optimizer.variables]
    for remote in comm.gather_objects(state):
        for local_part, remote_part in zip(state, remote, strict=True):
            np.testing.assert_array_equal(local_part, remote_part)


def test_a_difference_that_fit_ends_with_is_seen(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")

    class Ends(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            self.model.trainable_variables[0].assign_add(
                0 * self.model.trainable_variables[0] + comm.rank
            )

    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), cx.Scheme()))
    with pytest.raises(RuntimeError, match=r"ranks \[1"):
        fit(net, comm, 1, (Ends(),))
