"""Residuals outlive their optimizer, and neither they nor shards keep variables alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from threaded_optimizers import DENSE, gradients, new_weights, wrap

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.optim.exchanger import last_exchanger
from tfcommx.strategies import WeightAveraging

SPARSE = Scheme("hitopk", "exact", 0.2, dense_below=8)
TWO = Topology(2, 1)


@pytest.fixture(autouse=True)
def objects_of_this_test() -> None:
    """Let collections look through the objects of this test, not of all before it."""
    gc.freeze()


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(1.0)


def test_states_that_wait_are_dropped_with_the_others() -> None:
    """The velocities of undone steps returned under the next scheme with momentum."""

    def work(comm: Comm) -> bool:
        moving = Scheme("allgather", "exact", 0.2, dense_below=0, momentum=0.9)
        optimizer, weights = wrap(sgd(), comm, "synchronous", moving, "average"), new_weights()
        optimizer.apply(gradients(comm.rank, 0), weights)
        exchanger = optimizer.exchanger
        exchanger.switch(DENSE)
        optimizer.apply(gradients(comm.rank, 1), weights)
        had_velocities = bool(exchanger.waiting.velocities)
        exchanger.drop_residuals()
        state = exchanger.export()
        return had_velocities and not state.residuals and not state.velocities

    assert ThreadComm.run(TWO, work) == [True, True]


def test_residuals_outlive_their_optimizer() -> None:
    """Residuals of its sparse steps are sent by the dense step of the next optimizer."""

    def work(comm: Comm) -> list[np.ndarray]:
        weights = new_weights()
        start = [one.numpy() for one in weights]
        ones = [tf.ones(one.shape) for one in weights]
        sparse: Any = wrap(sgd(), comm, "synchronous", SPARSE, "average")
        for _ in range(2):
            sparse.apply(ones, weights)
        residuals = sparse.exchanger.export().residuals
        assert any(part.any() for part in residuals.values())
        gone = weakref.ref(sparse)
        del sparse
        gc.collect()
        assert gone() is None
        dense = wrap(sgd(), comm, "synchronous", DENSE, "average")
        dense.apply(ones, weights)
        assert all(last_exchanger(one) is dense.exchanger for one in weights)
        return [one.numpy() - before for one, before in zip(weights, start, strict=True)]

    for changes in ThreadComm.run(TWO, work):
        for change in changes:
            np.testing.assert_allclose(change, -3.0, rtol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "scheme", "traced"),
    [
        case(strategy, scheme, traced, kept=traced == (number % 2 == 0))
        for number, (strategy, scheme) in enumerate(
            [
                ("synchronous", SPARSE),
                ("sharded", DENSE),
                ("root", DENSE),
                (WeightAveraging(2, overlap=2), DENSE),
                (WeightAveraging(2, outer=keras.optimizers.SGD(0.7, momentum=0.9)), DENSE),
                ("step_ahead", SPARSE),
            ]
        )
        for traced in (False, True)
    ],
)
def test_variables_are_freed_with_their_optimizer(
    strategy: Any, scheme: Scheme, traced: bool
) -> None:
    """The record of who exchanged a variable's gradients last keeps neither alive."""

    def train(comm: Comm) -> list[weakref.ref[Any]]:
        optimizer, weights = wrap(sgd(), comm, strategy, scheme, "average"), new_weights()
        optimizer.build(weights)

        def take_step(parts: list[tf.Tensor]) -> None:
            optimizer.apply(parts, weights)

        step = tf.function(take_step) if traced else take_step
        for number in range(3):
            step(gradients(comm.rank, number))
        assert all(last_exchanger(one) is optimizer.exchanger for one in weights)
        return [weakref.ref(one) for one in (optimizer, optimizer.exchanger, *weights)]

    def work(comm: Comm) -> list[str]:
        """Run in the thread of the steps, whose objects are freed with it."""
        gone = train(comm)
        gc.collect()
        gc.collect()  # Also the exchanger, which the variables had until the first collection
        return [repr(one()) for one in gone if one() is not None]

    # Threads cannot trace at the same time
    ranks = ThreadComm.run(Topology(1, 1) if traced else TWO, work)
    assert not any(ranks), ranks
