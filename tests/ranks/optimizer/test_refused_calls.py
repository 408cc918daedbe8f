"""Calls of the wrapped optimizer that are refused, in words."""

from __future__ import annotations

import dataclasses

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from rank_helpers import (
    SPARSE,
    batch,
    compiled,
    fit,
    gradients_of,
    model,
)

import tfcommx as cx
from tfcommx.collectives.comm import Comm


@pytest.mark.one_rank
def test_momentum_twice_is_refused(comm: Comm) -> None:
    scheme = dataclasses.replace(SPARSE, momentum=0.9)
    for optimizer in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1)):
        with pytest.raises(cx.PlanError, match=r"`momentum`.*\b0\.9\b"):
            cx.DistributedOptimizer(optimizer, scheme)
        with pytest.raises(cx.PlanError, match=r"`momentum`.*\b0\.9\b"):
            cx.DistributedOptimizer(optimizer, SPARSE).exchanger.switch(scheme)


@pytest.mark.one_rank
def test_bad_calls(comm: Comm) -> None:
    wrapped = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(cx.ConfigurationError, match=f"'{wrapped.name}'"):
        cx.DistributedOptimizer(wrapped)
    by_horovod = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for optimizer in (by_horovod, keras.optimizers.LossScaleOptimizer(by_horovod)):
        with pytest.raises(cx.ConfigurationError, match=rf"'{optimizer.name}'.* hvd\."):
            cx.DistributedOptimizer(optimizer)
    remade = type(wrapped).from_config(wrapped.get_config())
    with pytest.raises(cx.ConfigurationError, match=f"'{remade.name}'"):
        remade.apply([tf.ones(2)], [keras.Variable(np.ones(2, "float32"))])
    with pytest.raises(cx.ConfigurationError, match=f"'{remade.name}'"):
        cx.DistributedOptimizer(remade)
    with pytest.raises(cx.ConfigurationError, match=r"'averag'.*'average'"):
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1), op="averag")
    with pytest.raises(cx.ConfigurationError, match=r"'hitpk'.*'hitopk'"):
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1), cx.Scheme("hitpk", "mstopk", 0.1))
    with pytest.raises(cx.ConfigurationError, match="node_size="):
        cx.init(node_size=comm.topology.slots + 1)


def test_a_scope_of_replicas_is_refused_on_several_ranks(comm: Comm) -> None:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        if comm.topology.size == 1:
            cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
            return
        with pytest.raises(cx.ConfigurationError, match="MirroredStrategy"):
            cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
        net = model()
    # Keras's error, "Mixing different tf.distribute.Strategy objects", gave no remedy
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    begin = cx.callbacks.BroadcastState()
    begin.set_model(net)
    with pytest.raises(cx.ConfigurationError, match="MirroredStrategy"):
        begin.on_train_begin()


def test_xla_is_refused_in_custom_loops_and_turned_off_in_fit(comm: Comm) -> None:
    net = model()
    wrapped = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    grads = gradients_of(net, batch(comm.rank))
    wrapped.build(net.trainable_variables)

    @tf.function(jit_compile=True)
    def step() -> None:
        wrapped.apply(grads, net.trainable_variables)

    with pytest.raises(cx.ConfigurationError, match="jit_compile=True"):
        step()
    compiled_net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    assert fit(compiled_net, comm).identical
    assert compiled_net.jit_compile is False


def test_different_schemes_are_refused_before_anything_is_sent(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    wrapped = cx.DistributedOptimizer(
        keras.optimizers.SGD(0.1),
        cx.Scheme("allgather", "mstopk", 0.1 if comm.rank else 0.2, dense_below=1),
    )
    net = model()
    with pytest.raises(cx.PlanError, match=r"`scheme`.*Rank 0\b.*rank 1\b.*density=0\.1"):
        wrapped.apply(gradients_of(net, batch(comm.rank)), net.trainable_variables)
