"""Weight averaging with an outer optimizer in `fit`: checkpoints, files and the end of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import SPARSE, SaveTheEpoch, compiled, fit, same_on_all_ranks, weights

import tfcommx as cx
from tfcommx.collectives.comm import Comm


def new(scheme: cx.Scheme, fragments: int, overlap: int) -> keras.Model:
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    strategy = cx.strategies.WeightAveraging(3, outer=outer, fragments=fragments, overlap=overlap)
    return compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme, strategy=strategy))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("scheme", "fragments", "overlap"),
    [case(cx.Scheme(), 1, 0, kept=False), case(SPARSE, 2, 0, kept=False), (SPARSE, 2, 1)],
    ids=["dense", "sparse-fragments", "sparse-overlap"],
)
def test_a_resumed_run_is_the_one_that_was_not_interrupted(
    comm: Comm,
    folder: Path,
    scheme: cx.Scheme,
    fragments: int,
    overlap: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Four steps in an epoch: each ends in the middle of a round, which then ends early."""
    whole, second = (new(scheme, fragments, overlap) for _ in range(2))

    class Saves(SaveTheEpoch):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            if epoch == 0:
                states.append(whole.optimizer.exchanger.common_state())
                assert same_on_all_ranks(comm, whole)

    states: list[dict[str, Any]] = []
    fit(whole, comm, epochs=2, extra=(Saves(folder),))
    assert cx.checkpoint.restore(second, folder) == 1
    (kept,), back = states, second.optimizer.exchanger.common_state()
    assert kept.keys() == back.keys() and len(kept) == len(weights(whole))
    for path, state in kept.items():
        assert any(np.any(value) for value in state.values())
        for name, value in state.items():
            np.testing.assert_array_equal(back[path][name], value)
    fit(second, comm, epochs=2, initial_epoch=1)
    for mine, expected in zip(weights(second), weights(whole), strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert same_on_all_ranks(comm, second)
    # The outer optimizer is a plain one, whose steps need no exchange
    assert "is not wrapped" not in caplog.text
    residuals = [net.optimizer.exchanger.export().residuals for net in (whole, second)]
    assert residuals[0].keys() == residuals[1].keys()
    for path, residual in residuals[0].items():
        np.testing.assert_array_equal(residuals[1][path], residual)


class Linear(keras.layers.Layer):
    """Whose gradients are its inputs, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.add_weight(shape=(5,), initializer="zeros", name="one")
        self.other = self.add_weight(shape=(4,), initializer="zeros", name="other")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs @ tf.concat([self.one, self.other], 0)[:, None]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fragments", "overlap", "steps_per_execution"),
    [case(1, 3, 1, kept=False), (2, 1, 2), case(1, 2, 8, kept=False)],
)
def test_rounds_that_overlap_steps_in_fit_lose_no_update(
    comm: Comm, fragments: int, overlap: int, steps_per_execution: int
) -> None:
    """With an outer rate of 1 the weights end at minus the mean of all that ranks have seen."""
    strategy = cx.strategies.WeightAveraging(
        3, outer=keras.optimizers.SGD(1.0), fragments=fragments, overlap=overlap
    )
    net = keras.Sequential([keras.layers.Input((9,)), Linear()])
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.5), strategy=strategy),
        loss=lambda _, found: tf.reduce_mean(found),
        jit_compile=False,
        steps_per_execution=steps_per_execution,
    )
    inputs = np.random.default_rng([7, comm.rank]).normal(size=(16, 9)).astype("float32")
    options = {"batch_size": 2, "epochs": 2, "verbose": 0, "shuffle": False}
    net.fit(inputs, inputs[:, 0], callbacks=[cx.callbacks.BroadcastState()], **options)
    assert same_on_all_ranks(comm, net)
    seen = np.mean(comm.gather_objects(inputs), axis=0).mean(axis=0)
    expected = -0.5 * 8 * 2 * seen  # The rate, steps and epochs
    np.testing.assert_allclose(np.concatenate(weights(net)), expected, rtol=1e-4, atol=1e-5)
