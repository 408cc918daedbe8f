"""Strategies under `fit`: Algorithms 2 and 3 of the linear pipeline paper."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
from drawing import case
from rank_helpers import (
    OPTIMIZERS,
    SPARSE,
    batch,
    compiled,
    fit,
    gradients_of,
    model,
    same_on_all_ranks,
    weights,
)

import tfcommx as cx
from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.strategies import Rebroadcast, Root, Strategy


@pytest.mark.parametrize(
    ("route", "strategy"),
    [
        case("allreduce", Root(), kept=False),
        ("allreduce", Rebroadcast(every=2)),
        pytest.param("pipeline", Root(), marks=pytest.mark.every_launch),
        case("pipeline", Rebroadcast(every=2), kept=False),
        case("hitopk", Root(), kept=False),
        case("hitopk", Rebroadcast(every=2), kept=False),
    ],
    ids=str,
)
def test_the_steps_of_the_linear_pipeline_paper(comm: Comm, route: str, strategy: Strategy) -> None:
    """Algorithms 2 and 3 under `fit` give the weights of an update on all ranks.

    The root's optimizer has the whole state.
    """
    if routes.get(route).messages and not comm.messages.possible:
        pytest.skip("takes messages: MPI")
    scheme = cx.Scheme(
        route,
        **({"selection": "mstopk", "density": 0.2} if route == "hitopk" else {}),
        dense_below=8,
    )
    plain, other = (
        compiled(cx.DistributedOptimizer(OPTIMIZERS["clipped_sgd"](), scheme, strategy=one))
        for one in ("synchronous", strategy)
    )
    for net in (plain, other):
        fit(net, comm)
        assert same_on_all_ranks(comm, net)
    for mine, expected in zip(weights(other), weights(plain), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
    if comm.rank == 0:
        for mine, expected in zip(
            other.optimizer.variables, plain.optimizer.variables, strict=True
        ):
            np.testing.assert_allclose(mine.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
    assert int(other.optimizer.iterations.numpy()) == int(plain.optimizer.iterations.numpy())


@pytest.mark.one_rank
def test_strategies_that_cannot_be_are_refused(comm: Comm) -> None:
    for wrong, received in (
        ("rot", r"'rot'.*'root'"),
        (Root, r"`strategy`.*Root'>"),
        (5, r"`strategy`.* 5\b"),
    ):
        with pytest.raises(cx.ConfigurationError, match=received):
            cx.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy=wrong)
    net = model()
    scheme = dataclasses.replace(SPARSE, momentum=0.9)
    wrapped = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme, strategy="root")
    with pytest.raises(cx.PlanError, match=r"strategy=\"root\".*\bmomentum\b"):
        wrapped.apply(gradients_of(net, batch(comm.rank)), net.trainable_variables)


def test_different_strategies_are_refused_before_anything_is_sent(comm: Comm) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    strategy = Root() if comm.rank else Rebroadcast(every=3)
    wrapped = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy=strategy)
    net = model()
    with pytest.raises(cx.PlanError, match=r"Rebroadcast\(every=3\).*Root\(\)"):
        wrapped.apply(gradients_of(net, batch(comm.rank)), net.trainable_variables)
