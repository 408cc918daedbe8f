"""Keras's callbacks with a state, in a run that resumes from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from drawing import case
from rank_helpers import batch, compiled, weights

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm

# The metric of each epoch: the best is in epoch 1, and the last is worse
SCORES = [4, 1, 3, 3, 2, 2, 2]


class Score(keras.callbacks.Callback):
    """Sets the metric that the others follow, and records rates."""

    def __init__(self, rates: dict[int, float]) -> None:
        super().__init__()
        self.rates = rates

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["score"] = float(SCORES[epoch])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.rates[epoch - 1] = round(float(self.model.optimizer.learning_rate), 6)


@pytest.mark.extended
def test_callbacks_that_follow_a_metric_continue_where_they_were(comm: Comm, folder: Path) -> None:
    """A resumed run waited anew, and replaced the file of its best model by a worse one."""

    def net() -> keras.Model:
        return compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), cx.Scheme()))

    def train(net: keras.Model, name: str, first: int, end: int) -> dict[int, float]:
        rates: dict[int, float] = {}
        parts: list[keras.callbacks.Callback] = [
            keras.callbacks.ReduceLROnPlateau("score", mode="min", patience=2, factor=0.5),
            cx.checkpoint.Checkpoint(folder / name),
            # Behind it, so they have not seen the last epoch of the save
            keras.callbacks.EarlyStopping(
                "score", mode="min", patience=4, restore_best_weights=True
            ),
        ]
        if comm.rank == 0:
            path = str(folder / f"{name}-{{score:.0f}}.weights.h5")
            parts.append(
                keras.callbacks.ModelCheckpoint(
                    path, "score", mode="min", save_best_only=True, save_weights_only=True
                )
            )
        x, y = batch(comm.rank)
        listed = [callbacks.BroadcastState(), Score(rates), *parts]
        net.fit(x, y, initial_epoch=first, epochs=end, verbose=0, callbacks=listed)
        return rates

    wanted, got = net(), net()
    rates = train(wanted, "whole", 0, 7)
    assert set(rates) == set(range(-1, 5)), "EarlyStopping ends it after epoch 5"
    resumed = train(net(), "part", 0, 3)  # The rate falls after epoch 3
    assert cx.checkpoint.restore(got, folder / "part") == 3
    assert resumed | train(got, "part", 3, 7) == rates
    for one, other in zip(weights(wanted), weights(got), strict=True):
        np.testing.assert_array_equal(one, other)
    comm.gather_objects("written")
    files = [path.name.partition("-")[2] for path in sorted(folder.glob("part-*"))]
    assert files == [f"{score}.weights.h5" for score in (1, 4)]


@pytest.mark.one_rank
def test_callbacks_begin_anew_in_a_fit_that_does_not_continue(comm: Comm, folder: Path) -> None:
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), cx.Scheme()))

    def fit(first: int, end: int) -> keras.callbacks.EarlyStopping:
        stopping = keras.callbacks.EarlyStopping("loss", patience=3)
        parts = [callbacks.BroadcastState(), stopping, cx.checkpoint.Checkpoint(folder / "run")]
        data = batch(comm.rank)
        net.fit(*data, initial_epoch=first, epochs=end, verbose=0, callbacks=parts)
        return stopping

    fit(0, 2)
    assert cx.checkpoint.restore(net, folder / "run") == 2
    again = fit(0, 1)
    assert (again.best_epoch, again.wait) == (0, 0)


@pytest.mark.extended
@pytest.mark.one_rank
@pytest.mark.parametrize("swaps_first", [True, case(False, kept=False)])
def test_weights_that_were_swapped_when_they_were_saved_are_swapped_back(
    comm: Comm, folder: Path, swaps_first: bool
) -> None:
    """A resumed run trained the moving averages, because Checkpoint had saved them as weights."""

    def net() -> keras.Model:
        plain = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        return compiled(cx.DistributedOptimizer(plain, cx.Scheme()))

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 3:
                raise InterruptedError

    def train(name: str, net: keras.Model, first: int, *more: keras.callbacks.Callback) -> None:
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        parts = [swap, cx.checkpoint.Checkpoint(folder / name)]
        if comm.rank == 0:  # The best epoch is the last one before the interruption
            path = str(folder / f"{name}.weights.h5")
            more += (
                keras.callbacks.ModelCheckpoint(
                    path, "score", mode="min", save_best_only=True, save_weights_only=True
                ),
            )
        listed = [*(parts if swaps_first else parts[::-1]), *more]
        listed = [callbacks.BroadcastState(), Score({}), *listed]
        x, y = batch(comm.rank)
        net.fit(x, y, initial_epoch=first, epochs=5, verbose=0, callbacks=listed)

    wanted, got = net(), net()
    train("whole", wanted, 0)
    with pytest.raises(InterruptedError):
        train("part", net(), 0, Interrupt())
    assert cx.checkpoint.restore(got, folder / "part") == 3
    train("part", got, 3)
    for one, other in zip(weights(wanted), weights(got), strict=True):
        np.testing.assert_array_equal(one, other)
    if comm.rank == 0:
        for one, name in ((wanted, "whole"), (got, "part")):
            one.load_weights(folder / f"{name}.weights.h5")
        for one, other in zip(wanted.get_weights(), got.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
