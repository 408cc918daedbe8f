"""Callbacks that read metrics, on ranks whose own metrics say opposite things, without averages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from rank_helpers import one_weight, same_on_all_ranks

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm
from tfcommx.runtime import replica_guard


@pytest.fixture(autouse=True)
def _all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_guard, "RANK_0_FIRST_SECONDS", 0.0)


class OwnMetric(keras.metrics.Metric):
    """Stands for a metric of the model: falls on rank 0, rises on the others."""

    def __init__(self, rank: int) -> None:
        super().__init__(name="own")
        self.slope = -1.0 if rank == 0 else 10.0
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, *arguments: Any, **options: Any) -> None:
        self.seen.assign_add(self.slope)

    def result(self) -> tf.Tensor:
        return self.seen

    def reset_state(self) -> None:
        pass


def net_of(comm: Comm, every: int | None = 3) -> keras.Model:
    net = one_weight(keras.optimizers.SGD(0.1))
    net.compile(
        cx.DistributedOptimizer(keras.optimizers.SGD(0.1), check_replicas_every=every),
        loss="mse",
        metrics=[OwnMetric(comm.rank)],
        jit_compile=False,
    )
    return net


def fit(net: keras.Model, *chosen: keras.callbacks.Callback, epochs: int = 9) -> Any:
    x = np.ones((4, 1), np.float32)
    return net.fit(x, x, batch_size=2, epochs=epochs, verbose=0, callbacks=list(chosen))


def plateau() -> keras.callbacks.Callback:
    return keras.callbacks.ReduceLROnPlateau(monitor="own", mode="min", patience=1)


@pytest.mark.extended
def test_a_plateau_of_one_rank_lowers_the_rate_of_all_behind_broadcast_state(
    comm: Comm, tmp_path: Path
) -> None:
    """It was: 0.1 on rank 0, 1e-6 on the others, and exit status 0.

    And a checkpoint of the best epoch is one of the same epoch on all ranks.
    """
    saved = tmp_path / f"{comm.rank}" / "{epoch}.keras"
    saved.parent.mkdir()
    best = keras.callbacks.ModelCheckpoint(saved, monitor="own", mode="min", save_best_only=True)
    net = net_of(comm)
    fit(net, callbacks.BroadcastState(), plateau(), best)
    rates = comm.gather_objects(float(net.optimizer.learning_rate))
    assert set(rates) == {rates[0]}
    assert (rates[0] < 0.1) == (comm.topology.size > 1)  # the mean rises: -1 and 10 a step
    assert same_on_all_ranks(comm, net)
    kept = sorted(path.name for path in saved.parent.iterdir())
    assert comm.gather_objects(kept) == [kept] * comm.topology.size
    assert kept == (["1.keras"] if comm.topology.size > 1 else [f"{n}.keras" for n in range(1, 10)])


def test_a_plateau_of_one_rank_is_an_error_without_broadcast_state(comm: Comm) -> None:
    """The first check is at step 1, the first difference after epoch 2: step 7 tells."""
    net = net_of(comm)
    alone = comm.topology.size == 1
    difference = r"(?s)ReplicaError.*step 6\b.*AverageMetrics"
    with contextlib.nullcontext() if alone else pytest.raises(Exception, match=difference):
        fit(net, plateau())
    assert alone or int(net.optimizer.iterations) <= 6 + 3


def test_early_stopping_stops_all_ranks_behind_broadcast_state(comm: Comm) -> None:
    net = net_of(comm)
    stopping = keras.callbacks.EarlyStopping(
        monitor="own", mode="min", patience=1, restore_best_weights=True
    )
    history = fit(net, callbacks.BroadcastState(), stopping)
    epochs = comm.gather_objects(len(history.epoch))
    assert epochs == [9 if comm.topology.size == 1 else 2] * comm.topology.size
    assert same_on_all_ranks(comm, net)


@pytest.mark.exhaustive  # test_curves_and_ratios has both callbacks
def test_metrics_that_broadcast_state_averages_are_averaged_once_more_in_vain(comm: Comm) -> None:
    both = [callbacks.BroadcastState(), callbacks.AverageMetrics()]
    once = fit(net_of(comm), both[0], epochs=1).history["own"]
    assert fit(net_of(comm), *both, epochs=1).history["own"] == once
