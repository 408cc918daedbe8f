"""Traced steps of overlapping sets of variables that take turns."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from threaded_optimizers import DENSE, wrap

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.optim.step_boundary import consolidate
from tfcommx.strategies import StepAhead, WeightAveraging

SELECTS = Scheme("allgather", "exact", 0.5, dense_below=0)
UPDATES = WeightAveraging(2, sends="updates")


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(
    ("strategy", "scheme"),
    [(StepAhead(), SELECTS), (UPDATES, DENSE), (WeightAveraging(2), DENSE)],
    ids=["step-ahead", "updates", "weights"],
)
def test_sets_that_take_turns_lose_no_update_or_are_refused(
    strategy: Any, scheme: Scheme, traced: bool
) -> None:
    """Updates of the shared trunk were lost: each run continued from its own copy of it."""

    def work(comm: Comm) -> list[np.ndarray] | str:
        trunk, first, second = (keras.Variable(np.zeros((2, 2), "float32")) for _ in range(3))
        optimizer = wrap(keras.optimizers.SGD(1.0), comm, strategy, scheme, "average")
        optimizer.build([trunk, first, second])
        gradient = tf.fill([2, 2], 1.0 + comm.rank)

        def step_of(head: keras.Variable) -> Any:
            def step() -> None:
                optimizer.apply([gradient, gradient], [trunk, head])

            return tf.function(step) if traced else step

        steps = [step_of(first), step_of(second)]
        try:
            for number in range(6):
                steps[number % 2]()
        except tf.errors.OpError as error:
            return str(error)
        for _ in range(4 if scheme is SELECTS else 0):  # Sends the residuals
            for head in (first, second):
                optimizer.apply([tf.zeros([2, 2])] * 2, [trunk, head])
        consolidate(optimizer)
        return [variable.numpy() for variable in (trunk, first, second)]

    ranks = 1 if traced else 2  # Threads cannot trace collectives
    for result in ThreadComm.run(Topology(ranks, 1), work):
        if traced and strategy != WeightAveraging(2):
            assert "ConfigurationError" in result
            continue
        assert not isinstance(result, str), result
        for weight, steps in zip(result, (6, 3, 3), strict=True):
            np.testing.assert_allclose(weight, -steps * (1 + ranks) / 2)
