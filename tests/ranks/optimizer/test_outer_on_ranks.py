"""Weight averaging with an outer optimizer in `fit`: checkpoints, files and the end of training."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from rank_helpers import SPARSE, compiled, fit, same_on_all_ranks, weights

import tfcommx as cx
from tfcommx.comm.base import Comm


def new(scheme: cx.Scheme, fragments: int) -> keras.Model:
    strategy = cx.strategies.WeightAveraging(
        every=3, outer=keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True), fragments=fragments
    )
    return compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme, strategy=strategy))


@pytest.mark.every_launch
@pytest.mark.parametrize(
    ("scheme", "fragments"), [(cx.Scheme(), 1), (SPARSE, 2)], ids=["dense", "sparse-fragments"]
)
def test_a_resumed_run_is_the_one_that_was_not_interrupted(
    comm: Comm,
    folder: Path,
    scheme: cx.Scheme,
    fragments: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Four steps in an epoch: each ends in the middle of a round, which then ends early."""
    whole, first, second = (new(scheme, fragments) for _ in range(3))
    fit(whole, comm, epochs=2)
    fit(first, comm, epochs=1, extra=(cx.checkpoint.Checkpoint(folder),))
    assert same_on_all_ranks(comm, first)
    assert cx.checkpoint.restore(second, folder) == 1
    kept, back = (net.optimizer.exchanger.common_state() for net in (first, second))
    assert kept.keys() == back.keys() and len(kept) == len(weights(first))
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
    residuals = [net.optimizer.exchanger.state_by_variable().residuals for net in (whole, second)]
    assert residuals[0].keys() == residuals[1].keys()
    for path, residual in residuals[0].items():
        np.testing.assert_array_equal(residuals[1][path], residual)
