"""The rank whose state and names all others get, and roots that cannot be meant."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfcommx as cx
from tfcommx.collectives.comm import Comm


@pytest.mark.parametrize(
    "wrong", [pytest.param("none of the ranks", marks=pytest.mark.one_rank), "its own"]
)
def test_a_root_that_no_rank_can_be_is_refused_before_anything_is_sent(
    comm: Comm, wrong: str
) -> None:
    """The first was an IndexError, the second an error of Horovod in the midst of the broadcast."""
    if wrong == "its own" and comm.topology.size == 1:
        return
    root = comm.rank if wrong == "its own" else comm.topology.size
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    with pytest.raises(cx.ConfigurationError, match="`root`"):
        model.fit(
            np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[cx.callbacks.BroadcastState(root)]
        )
    with pytest.raises(cx.ConfigurationError, match="`root`"):
        cx.broadcast_variables(model.weights, root)


def test_shards_have_the_names_of_the_root_in_a_loop(comm: Comm) -> None:
    """Their names of the build remained, and the first step refused the plan."""
    if comm.rank:
        keras.layers.Dense(1)  # The next layer has another number
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="sharded")
    optimizer.build(model.trainable_variables)
    cx.broadcast_variables([*model.weights, *optimizer.variables])
    optimizer.apply([tf.ones(weight.shape) for weight in model.weights], model.weights)
    everyone = comm.gather_objects([weight.numpy().tobytes() for weight in model.weights])
    assert all(other == everyone[0] for other in everyone)


def test_values_that_all_ranks_have_are_not_sent_again(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `fit` of a loop over epochs sent the whole model, 3 ms of CPU time for each variable."""
    sent: list[tf.Tensor] = []
    broadcast = comm.broadcast

    def record(tensor: tf.Tensor, *arguments: Any) -> tf.Tensor:
        sent.append(tensor)
        return broadcast(tensor, *arguments)

    monkeypatch.setattr(comm, "broadcast", record)
    half = np.float32(0.5 + comm.rank)
    parts = [tf.Variable(half), tf.Variable(tf.fill([3], half)), tf.Variable(tf.cast(half, "half"))]
    parts.append(tf.Variable(tf.cast(half, tf.bfloat16)))
    cx.broadcast_variables(parts)
    several = comm.topology.size > 1
    assert len(sent) == 3 * several
    cx.broadcast_variables(parts)
    assert len(sent) == 3 * several
    # Permuted entries have equal sums
    parts[1].assign([1, 2, 3] if comm.rank else [3, 2, 1])
    cx.broadcast_variables(parts)
    assert [tensor.shape for tensor in sent[3:]] == [[3]] * several
    assert parts[1].numpy().tolist() == [3, 2, 1]
