"""LARS and LAMB, wrapped: as the plain ones on the joint batch, under every scheme and strategy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import OPTIMIZERS, SPARSE, batch, compiled, fit, gradients_of, model, weights

import tfcommx as cx
from tfcommx import routes
from tfcommx.collectives.comm import Comm

KINDS = {"lars": cx.optimizers.LARS, "lamb": cx.optimizers.LAMB}
OPTIONS = [
    {},
    {"global_clipnorm": 0.01},
    {"gradient_accumulation_steps": 2},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"loss_scale_factor": 8.0},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        case(kind, options, kept=number == 2 * turn)
        for turn, kind in enumerate(KINDS)
        for number, options in enumerate(OPTIONS)
    ],
)
def test_wrapped_equals_plain_on_the_joint_batch(
    comm: Comm, kind: str, options: dict[str, Any]
) -> None:
    net, reference = model(), model()
    wrapped, plain = (KINDS[kind](0.05, weight_decay=0.01, **options) for _ in range(2))
    wrapped = cx.DistributedOptimizer(wrapped)
    wrapped.build(net.trainable_variables)  # Or the first step would be traced twice

    @tf.function
    def step(*grads: tf.Tensor) -> None:
        wrapped.apply(list(grads), net.trainable_variables)

    for number in range(4):
        every = [gradients_of(reference, batch(rank, number)) for rank in range(comm.topology.size)]
        step(*every[comm.rank])
        joint = [sum(parts) / comm.topology.size for parts in zip(*every, strict=True)]
        plain.apply(joint, reference.trainable_variables)
    for mine, theirs in zip(weights(net), weights(reference), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.exhaustive  # an optimizer does not see the route
@pytest.mark.parametrize(
    ("kind", "route"),
    [(kind, route) for kind in KINDS for route in routes.ROUTES],
)
def test_trains_on_every_route(comm: Comm, kind: str, route: str) -> None:
    scheme = SPARSE if route == "hitopk" else cx.Scheme(route)
    if route in routes.SPARSE:
        scheme = cx.Scheme(route, "mstopk", 0.2, dense_below=8)
    if routes.get(route).messages and not comm.messages.possible:
        with pytest.raises(cx.PlanError, match="horovodrun --mpi"):
            cx.DistributedOptimizer(OPTIMIZERS[kind](), scheme)
        return
    check(comm, cx.DistributedOptimizer(OPTIMIZERS[kind](), scheme))


@pytest.mark.exhaustive  # test_strategies_in_fit.py has SGD
@pytest.mark.parametrize(
    ("kind", "strategy"), [(kind, way) for way in ("root", "rebroadcast") for kind in KINDS]
)
def test_trains_with_every_strategy(comm: Comm, kind: str, strategy: str) -> None:
    check(comm, cx.DistributedOptimizer(OPTIMIZERS[kind](), strategy=strategy))


@pytest.mark.exhaustive  # test_loss_scale.py has SGD under one
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scale_is_agreed(comm: Comm, kind: str) -> None:
    scaled = keras.optimizers.LossScaleOptimizer(OPTIMIZERS[kind](), initial_scale=4.0)
    check(comm, cx.DistributedOptimizer(scaled))


def check(comm: Comm, optimizer: keras.optimizers.Optimizer) -> None:
    """Train: the loss falls, and replicas stay identical."""
    net = compiled(optimizer, seed=comm.rank)
    assert fit(net, comm).identical
    history = net.history.history["loss"]
    assert history[-1] < history[0]
