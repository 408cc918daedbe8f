"""Preprocessing layers that a data set uses, and not the model, are compared between ranks.

Each rank adapted them to its part of the data, and normalized by other constants, or looked words
up in another vocabulary, without a message.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.keras_internals.models import finalize_layers

layers = keras.layers


def train(inputs: np.ndarray, *first: keras.layers.Layer) -> None:
    net = keras.Sequential([keras.Input((1,)), *first, layers.Dense(1)])
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), cx.Scheme())
    net.compile(optimizer, "mse", run_eagerly=True)
    net.fit(inputs, inputs, verbose=0, callbacks=[cx.callbacks.BroadcastState()])


def normalization(comm: Comm) -> keras.layers.Layer:
    layer = layers.Normalization()
    layer.adapt(np.array([[0.0], [2.0]]) + 5 * comm.rank)
    return layer


def normalization_on_one_rank(comm: Comm) -> keras.layers.Layer:
    layer = layers.Normalization()
    if comm.rank == 0:
        layer.adapt(np.array([[4.0], [6.0]]))
    else:
        layer(np.zeros((1, 1)))
    return layer


def words(comm: Comm) -> keras.layers.Layer:
    layer = layers.StringLookup()
    layer.adapt(["a", "b", "b"] if comm.rank else ["a", "a", "b"])
    return layer


def share_normalization(layer: keras.layers.Layer, comm: Comm) -> None:
    cx.broadcast_variables(layer.variables)


def share_words(layer: keras.layers.Layer, comm: Comm) -> None:
    layer.set_vocabulary(comm.gather_objects(layer.get_vocabulary())[0])


@pytest.mark.parametrize(
    ("adapt", "share", "message"),
    [
        (normalization, share_normalization, r"Normalization.*\[1\.0, 1\.0\].*\[6\.0, 1\.0\]"),
        (normalization_on_one_rank, share_normalization, r"\[5\.0, 1\.0\].*\[0\.0, 1\.0\]"),
        (words, share_words, r"StringLookup.* 3 .*rank 0.* 3 .*rank 1"),
    ],
)
def test_a_layer_outside_of_the_model_is_adapted_alike(
    comm: Comm,
    adapt: Callable[[Comm], keras.layers.Layer],
    share: Callable[[keras.layers.Layer, Comm], None],
    message: str,
) -> None:
    """The remedies of the error are tried, too."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    layer = adapt(comm)
    inputs = np.arange(4.0)[:, None]
    with pytest.raises(cx.ConfigurationError, match=message):
        train(inputs)
    share(layer, comm)
    train(inputs)


def test_a_layer_that_one_rank_alone_adapts_is_its_own(comm: Comm) -> None:
    """As for an evaluation on rank 0. That of a model is broadcast with it."""
    layer = normalization(comm) if comm.rank == 0 else None
    train(np.arange(4.0)[:, None])
    del layer
    inside = normalization(comm)
    train(np.arange(4.0)[:, None], inside)
    assert float(np.ravel(inside.mean)[0]) == 1.0


def test_a_broadcast_in_a_loop_derives_constants_again(comm: Comm) -> None:
    """Each rank normalized by its own constants under equal weights. Also in a step of `fit`."""
    layer = normalization(comm)
    net = keras.Sequential([keras.Input((1,)), layer, layers.Dense(1)])
    cx.broadcast_variables(net.weights)
    probe = np.ones((1, 1))
    outputs = comm.gather_objects(net(probe).numpy().item())
    assert len(set(outputs)) == 1
    before = net.predict(probe, verbose=0).item()
    layer.adapt_mean.assign(layer.adapt_mean + 1)
    cx.broadcast_variables(net.weights)
    assert finalize_layers(net)
    assert net.predict(probe, verbose=0).item() != before
    assert not finalize_layers(net)
