"""Changes during `fit`: schemes, resolution, density, learning rate."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import drawn
from rank_helpers import (
    SPARSE,
    compiled,
    fit,
    take_step,
    weights,
)

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm
from tfcommx.core import ConfigurationError
from tfcommx.runtime.gradient_state import add_vectors


def test_switching_schemes_and_resolution_in_fit(comm: Comm) -> None:
    """Sparse, then dense: all residuals are sent, and the pictures grow; the rate has warmed up."""
    resolution = tf.Variable(4)
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.05), SPARSE))
    seen: dict[int, tuple[int, bool]] = {}
    rates: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            rates.append(float(net.optimizer.learning_rate.numpy()))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            waiting = any(comm.gather_objects(bool(net.optimizer.exchanger.export().residuals)))
            seen[epoch] = (int(resolution.numpy()), waiting)

    switch = callbacks.SwitchScheme({1: cx.Scheme("torus")}, {1: 8}, resolution)
    warm_up = callbacks.WarmUp(0.4, steps=4, start=0.0)
    assert fit(net, comm, extra=(switch, warm_up, Watch())).identical
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.3, *[0.4] * 4], rtol=1e-6)
    assert seen == {0: (4, True), 1: (8, False)}
    traffic = net.optimizer.exchanger.traffic()
    per_step = traffic["bytes_between_nodes_dense"] / 8
    assert (per_step > 0) == (comm.topology.nodes > 1)


@pytest.mark.parametrize(
    ("strategy", "scheme"),
    [("weight_averaging", SPARSE), ("synchronous", {"*kernel": SPARSE})],
    ids=["of_a_strategy", "of_a_variable"],
)
def test_a_later_scheme_is_refused_before_the_first_step(
    comm: Comm, strategy: str, scheme: Any
) -> None:
    """By the strategy, or because no pattern matches a bias: the run ended in that epoch."""
    net = compiled(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.05), cx.Scheme(), strategy=strategy)
    )
    with pytest.raises(ConfigurationError):
        fit(net, comm, extra=(callbacks.SwitchScheme({1: scheme}),))
    assert net.optimizer.iterations == 0


@pytest.mark.exhaustive
def test_the_density_warms_up_with_momentum(comm: Comm) -> None:
    scheme = cx.Scheme("hitopk", "mstopk", 0.05, dense_below=8, momentum=0.9)
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme))
    sent: list[int] = []
    kept: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            exchanger = net.optimizer.exchanger
            sent.append(sum(bucket.k or 0 for plan in exchanger.plans() for bucket in plan.buckets))
            kept.append(
                max(float(np.abs(part).max()) for part in exchanger.export().velocities.values())
            )

    assert fit(
        net, comm, epochs=3, extra=(callbacks.SwitchScheme(scheme.warm_up([0.25])), Watch())
    ).identical
    assert sent[0] > sent[1] == sent[2] and min(kept) > 0
    moving = comm.gather_objects(net.optimizer.exchanger.export().velocities)
    net.optimizer.exchanger.switch(cx.Scheme("torus"))  # no momentum: the velocity rests
    take_step(net, comm)
    assert {
        path: part.tobytes() for path, part in net.optimizer.exchanger.export().velocities.items()
    } == {path: part.tobytes() for path, part in moving[comm.rank].items()}


def total(comm: Comm, optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
    """Return the sums of the ranks' residuals."""
    parts = comm.gather_objects(optimizer.exchanger.export().residuals)
    return functools.reduce(add_vectors, parts, {})


def test_what_waits_counts_less_as_the_rate_rises(comm: Comm) -> None:
    """The scaled residuals, summed over the ranks, are sent or stay residuals."""
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.125), SPARSE))
    take_step(net, comm)

    def waiting() -> dict[str, np.ndarray]:
        return total(comm, net.optimizer)

    for rate, factor in ((1.0, 8), (0.5, 1), (1.5, 1)):
        net.optimizer.learning_rate = rate
        before, start = waiting(), weights(net)
        net.optimizer.apply([tf.zeros(one.shape) for one in net.trainable_variables])
        after = waiting()
        assert before
        for variable, was in zip(net.trainable_variables, start, strict=True):
            if variable.path in before:
                sent = (was - variable.numpy()).ravel() / rate * comm.topology.size
                stays = after.get(variable.path, 0)
                np.testing.assert_allclose(
                    sent + stays, before[variable.path] / factor, rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize(
    ("change", "rates"),
    drawn(["scheme", "dense", "optimizer"], [(0.25, 1.0), (1.0, 0.25, 1.0)]),
)
def test_the_highest_rate_outlives_plans(comm: Comm, change: str, rates: tuple[float, ...]) -> None:
    """Of the first plan come all rates but the last: in its step nothing but residuals is sent."""
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(rates[0]), SPARSE))
    variables = net.trainable_variables
    optimizer = net.optimizer
    optimizer.build(variables)
    for rate in rates[:-1]:
        optimizer.learning_rate = rate
        own = [tf.random.stateless_normal(one.shape, [comm.rank, 7]) for one in variables]
        optimizer.apply(own)
    before, factor = total(comm, optimizer), rates[-1] / max(rates[:-1])
    assert before
    if change == "optimizer":
        optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(rates[-1]), SPARSE)
        optimizer.build(variables)
    else:
        denser = cx.Scheme("hitopk", "mstopk", 0.1, dense_below=8)
        optimizer.exchanger.switch(denser if change == "scheme" else cx.Scheme("torus"))
    optimizer.learning_rate = rates[-1]
    start = weights(net)
    optimizer.apply([tf.zeros(one.shape) for one in variables])
    after = total(comm, optimizer)
    for variable, was in zip(variables, start, strict=True):
        if variable.path in before:
            sent = (was - variable.numpy()).ravel() / rates[-1] * comm.topology.size
            whole = sent + after.get(variable.path, 0)
            np.testing.assert_allclose(whole, before[variable.path] / factor, rtol=1e-4, atol=1e-5)
