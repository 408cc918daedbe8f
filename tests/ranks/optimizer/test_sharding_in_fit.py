"""Sharded and averaged weights under `fit`: evaluation, files, checkpoints, loss scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from rank_helpers import batch, compiled, fit, same_on_all_ranks, weights

import tfcommx as cx
from tfcommx.comm.base import Comm
from tfcommx.strategies import Sharded, WeightAveraging


def adamw() -> keras.optimizers.Optimizer:
    """Return what uses most of what shards must keep apart."""
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=4.0)


class Seen(keras.callbacks.Callback):
    """What evaluations within `fit` see, and that model.save then writes."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__()
        self.path, self.rank = path, rank
        self.weights: list[list[np.ndarray]] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.weights.append(weights(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.rank == 0:
            self.model.save(self.path)


def trained(comm: Comm, strategy: Any, make: Any, path: Path) -> tuple[keras.Model, Seen]:
    """Train two epochs, with an evaluation after each."""
    net, seen = compiled(cx.DistributedOptimizer(make(), strategy=strategy)), Seen(path, comm.rank)
    x, y = batch(comm.rank, rows=32)
    net.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x[:8], y[:8]),
        callbacks=[cx.callbacks.BroadcastState(), seen],
    )
    return net, seen


def close(comm: Comm, mine: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Compare: the bits on two ranks, where sums have one order."""
    for one, other in zip(mine, theirs, strict=True):
        if comm.topology.size <= 2:
            assert one.tobytes() == other.tobytes()
        else:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.every_launch
def test_shards_in_fit_equal_synchronous_training(comm: Comm, folder: Path) -> None:
    """With pulls that begin the steps: also what evaluations see and what files hold."""
    for name, make in (("adamw", adamw), ("scaled", scaled)):
        found = {}
        for strategy in ("synchronous", Sharded("layers")):
            path = folder / f"{name}-{getattr(strategy, 'pull', strategy)}.keras"
            net, seen = trained(comm, strategy, make, path)
            assert same_on_all_ranks(comm, net)
            comm.gather_objects("saved")
            found[strategy] = net, seen, keras.models.load_model(path)
        (plain, saw, file), (sharded, also_saw, other_file) = found.values()
        close(comm, weights(sharded), weights(plain))
        for mine, theirs in zip(also_saw.weights, saw.weights, strict=True):
            close(comm, mine, theirs)
        close(comm, weights(other_file), weights(file))
        ours, theirs = ([v.numpy() for v in one.optimizer.variables] for one in (other_file, file))
        assert len(ours) > 8
        close(comm, ours, theirs)
        if comm.topology.size > 1:
            run = sharded.optimizer.exchanger.sharding.run
            assert sharded.train_function is None and bool(run.shards.current.numpy())


def test_a_run_of_shards_continues_from_its_checkpoint(comm: Comm, folder: Path) -> None:
    def continued(strategy: Any, epochs: int) -> keras.Model:
        net = compiled(cx.DistributedOptimizer(adamw(), strategy=strategy))
        first = cx.checkpoint.restore(net, folder)
        fit(net, comm, epochs, (cx.checkpoint.Checkpoint(folder),), first)
        return net

    once = compiled(cx.DistributedOptimizer(adamw()))
    fit(once, comm, 2)
    continued(Sharded("layers"), 1)
    resumed = continued(Sharded(), 2)  # Shards may be cut in another way
    assert same_on_all_ranks(comm, resumed)
    assert int(resumed.optimizer.iterations) == int(once.optimizer.iterations)
    close(comm, weights(resumed), weights(once))


@pytest.mark.every_launch
def test_weights_are_averaged_before_evaluations_and_files(comm: Comm, folder: Path) -> None:
    """Four steps in an epoch, an average every three: the end of an epoch averages, too."""
    strategy = WeightAveraging(every=3, sends="updates", momentum="average")
    make = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    net, seen = trained(comm, strategy, make, folder / "averaged.keras")
    everyone = comm.gather_objects([value.tobytes() for one in seen.weights for value in one])
    assert all(one == everyone[0] for one in everyone)
    assert same_on_all_ranks(comm, net)
