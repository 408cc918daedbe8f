"""Options of Keras's optimizers under the wrap."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import (
    batch,
    compiled,
    fit,
    gradients_of,
    model,
    same_on_all_ranks,
    weights,
)

import tfcommx as cx
from tfcommx.collectives.comm import Comm


@pytest.mark.parametrize(
    "options",
    [
        case({"clipnorm": 0.01}, kept=False),
        case({"clipvalue": 0.001}, kept=False),
        case({"global_clipnorm": 0.01}, kept=False),
        {"use_ema": True, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2},
        case({"weight_decay": 0.01}, kept=False),
        {"loss_scale_factor": 8.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_keras_optimizers(comm: Comm, options: dict[str, Any]) -> None:
    """Each option acts on the average: a plain optimizer that is given it has the same weights."""
    net, reference = model(), model()
    wrapped = cx.DistributedOptimizer(keras.optimizers.SGD(0.1, **options))
    plain = keras.optimizers.SGD(0.1, **options)
    wrapped.build(net.trainable_variables)  # Or the first step would be traced twice

    def apply(
        optimizer: keras.optimizers.Optimizer, net: keras.Model, grads: list[tf.Tensor]
    ) -> None:
        optimizer.apply(grads, net.trainable_variables)

    step = tf.function(lambda *grads: apply(wrapped, net, list(grads)))
    for number in range(4):
        every = [gradients_of(reference, batch(rank, number)) for rank in range(comm.topology.size)]
        step(*every[comm.rank])
        apply(
            plain,
            reference,
            [sum(parts) / comm.topology.size for parts in zip(*every, strict=True)],
        )
    for mine, theirs in zip(weights(net), weights(reference), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert same_on_all_ranks(comm, net)


@pytest.mark.one_rank
@pytest.mark.parametrize("excluded", [["bias"], None])
def test_what_the_config_leaves_out_survives_the_wrap(
    comm: Comm, excluded: list[str] | None
) -> None:
    plain = keras.optimizers.SGD(1.0, weight_decay=0.5)
    if excluded:
        plain.exclude_from_weight_decay(var_names=excluded)
    bias = keras.Variable(np.ones(2, "float32"), name="bias")
    cx.DistributedOptimizer(plain).apply([tf.zeros(2)], [bias])
    np.testing.assert_allclose(bias.numpy(), 1.0 if excluded else 0.5)


@pytest.mark.extended
def test_a_search_for_nan_by_tensorflow_finds_none_in_the_exchange(comm: Comm) -> None:
    """PowerSGD's graph had a constant NaN, for a rank whose gradients are not finite."""
    net = model()
    schemes = {
        "*hidden*": cx.Scheme(compression="powersgd/1", dense_below=8),
        "*out*": cx.Scheme("hitopk", "mstopk", 0.2, wire="elias/int4", dense_below=8),
        "*": cx.Scheme("asa", wire="int4"),
    }
    wrapped = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=schemes)
    tf.debugging.enable_check_numerics()
    try:
        step = tf.function(lambda *grads: wrapped.apply(list(grads), net.trainable_variables))
        for number in range(2):
            step(*gradients_of(net, batch(comm.rank, number)))
    finally:
        tf.debugging.disable_check_numerics()
    assert same_on_all_ranks(comm, net)


def test_accumulated_steps_are_exchanged_once(comm: Comm) -> None:
    net = compiled(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))
    )
    fit(net, comm, epochs=2)
    (run,) = net.optimizer.exchanger.runs.values()
    assert run.executor.steps.numpy() == 2
    assert net.optimizer._iterations.numpy() == 8
