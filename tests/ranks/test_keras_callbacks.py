"""Keras's own callbacks on ranks: their files, their order, their moving averages."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from drawing import case
from rank_helpers import SPARSE, batch, compiled, fit, same_on_all_ranks

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm


def wrapped(plain: keras.optimizers.Optimizer | None = None) -> keras.Model:
    plain = plain or keras.optimizers.SGD(0.1)
    return compiled(cx.DistributedOptimizer(plain, cx.Scheme(), check_replicas_every=1))


def train(net: keras.Model, comm: Comm, *listed: Any, **options: Any) -> None:
    x, y = batch(comm.rank, rows=16)
    net.fit(x, y, **{"batch_size": 8, "verbose": 0, **options}, callbacks=list(listed))


@pytest.mark.extended
def test_weights_return_to_the_bit_from_their_moving_averages(comm: Comm) -> None:
    """Keras's SwapEMAWeights adds and subtracts, which rounds.

    If rank 0 alone evaluated, its weights differed from those of the other ranks in the next step.
    """
    net = wrapped(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9))
    validated = {"validation_data": batch(0)} if comm.rank == 0 else {}
    seen: list[list[np.ndarray]] = []

    class Watch(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            seen.append([variable.numpy() for variable in net.trainable_variables])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if validated:
                self.on_test_begin()

    first, swap = callbacks.BroadcastState(), keras.callbacks.SwapEMAWeights()
    train(net, comm, first, Watch(), swap, epochs=2, **validated)
    assert same_on_all_ranks(comm, net) and len(seen) == (4 if validated else 0)
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.extended
@pytest.mark.parametrize("best", [case("min", kept=False), "max"])
def test_residuals_of_undone_epochs_are_dropped(comm: Comm, best: str) -> None:
    """A `fit` after EarlyStopping had restored the best weights sent those of a divergence."""
    net = compiled(cx.DistributedOptimizer(keras.optimizers.SGD(0.02), SPARSE))
    stop = keras.callbacks.EarlyStopping("loss", 0, 1, mode=best, restore_best_weights=True)
    fit(net, comm, 2, (stop,))
    assert stop.best_epoch == (1 if best == "min" else 0)
    assert bool(net.optimizer.exchanger.export().residuals) == (best == "min")


def test_callbacks_that_need_another_position_or_one_rank_are_named(
    comm: Comm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks wrote one file at the same time, or stopped alone, without a warning."""

    def told(*listed: keras.callbacks.Callback) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tfcommx"):
            train(net, comm, *listed)
        names = ("EarlyStopping", "TerminateOnNaN", "CSVLogger", "BackupAndRestore")
        return [name for text in caplog.messages for name in names if text.startswith(name)]

    net, named = wrapped(), keras.callbacks
    stop = named.EarlyStopping("loss")
    received = told(stop, callbacks.BroadcastState(), named.TerminateOnNaN())
    several = comm.topology.size > 1 and comm.rank == 0
    assert received == ["EarlyStopping", "TerminateOnNaN"] * several

    together = [named.CSVLogger(folder / "log.csv"), named.BackupAndRestore(folder / "none/backup")]
    first = callbacks.BroadcastState()
    first.set_model(net)
    first.set_params({"steps": 2, "epochs": 1})
    # Without `fit`, in which the ranks would damage the files
    listed = keras.callbacks.CallbackList([first, *together])
    with caplog.at_level(logging.WARNING, "tfcommx"):
        caplog.clear()
        for callback in together:
            callback.on_train_begin = lambda logs=None: None
        listed.on_train_begin()
    files = [text for text in caplog.messages if f"on {comm.topology.size} ranks" in text]
    assert len(files) == 2 * several
    assert all("is_chief" in text or "rank()" in text for text in files)

    own = folder / f"{comm.rank}.csv"
    quiet = callbacks.Standard(stop, named.TerminateOnNaN(), named.CSVLogger(own))
    assert told(quiet) == []


@pytest.mark.extended
def test_backups_of_ranks_may_differ(comm: Comm, folder: Path) -> None:
    """As of ranks that updated apart, or were killed after different steps: replicas differed."""
    net, backup = wrapped(), keras.callbacks.BackupAndRestore(folder / f"{comm.rank}")
    backup.set_model(net)
    backup.on_train_begin()
    net.layers[0].bias.assign_add([float(comm.rank + 1)] * 16)
    backup.on_epoch_end(0)
    train(wrapped(), comm, callbacks.BroadcastState(), backup, epochs=2)
    assert same_on_all_ranks(comm, backup.model)


def test_standard_as_the_whole_list_is_refused(comm: Comm) -> None:
    """Keras gives a list of the user's no model: 'NoneType' object has no attribute."""
    with pytest.raises(cx.ConfigurationError, match=r"callbacks=\[cx\.callbacks\.Standard"):
        x, y = batch(comm.rank)
        wrapped().fit(x, y, verbose=0, callbacks=callbacks.Standard())


@pytest.mark.extended
def test_a_fit_that_was_interrupted_is_begun_again(comm: Comm) -> None:
    """As in a notebook: the next `fit` compared models by the callback of the first one."""
    net, first = wrapped(), callbacks.BroadcastState()
    compared: list[Any] = []
    first._compare_outputs = compared.append

    def interrupt(batch: int, logs: Any = None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(net, comm, first, keras.callbacks.LambdaCallback(on_train_batch_begin=interrupt))
    assert fit(net, comm, epochs=1).identical and not compared
