"""Scripts that call `fit` more than once, or end after it, in a supervised run that is restarted.

Generations are played in this process: the supervisor's variables are set, and no supervisor
answers.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import tfcommx as cx
from tfcommx.checkpoint import callback, lock, newest, restoring, snapshots
from tfcommx.launch.supervision import Supervision


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that begins a generation of a run."""
    monkeypatch.setattr("tfcommx.launch.supervision.MEMORY", str(tmp_path))

    def begin(generation: int) -> None:
        run = Supervision("0123456789abcdef", generation, "secret", (("127.0.0.1", 1),), "node1")
        for module in (callback, lock, newest, restoring, snapshots):
            monkeypatch.setattr(module, "supervision", lambda: run)
        monkeypatch.setattr(snapshots.Snapshots, "_counted", 0)
        newest._found.clear()

    return begin


class Lost(keras.callbacks.Callback):
    """Ends a `fit` at the beginning of an epoch, as the loss of its rank does."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if epoch == self.at:
            raise InterruptedError


# Each `fit` takes two steps an epoch
OPTIONS = {"batch_size": 2, "shuffle": False, "verbose": 0}


def compiled() -> tuple[keras.Model, np.ndarray]:
    """Return a model that is made alike each time, and its data."""
    cx.init()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, loss="mse", jit_compile=False)
    data = np.arange(8, dtype=np.float32).reshape(4, 2)
    return model, data


def train(folder: Path, lost_at: int, same: bool) -> tuple[keras.Model, list[int], int]:
    """Train in two phases; return the model, the epochs of the second, and all counted steps.

    Args:
        same: True for one Checkpoint of both phases, False for two with their own folders.
    """
    model, data = compiled()
    first = cx.checkpoint.Checkpoint(folder / "first")
    model.fit(data, data[:, :1], epochs=3, callbacks=[first], **OPTIONS)
    second = first if same else cx.checkpoint.Checkpoint(folder / "second")
    callbacks = [second, Lost(lost_at)]
    trained = model.fit(data, data[:, 1:], epochs=4, callbacks=callbacks, **OPTIONS)
    return model, trained.epoch, snapshots.Snapshots._counted


@pytest.mark.extended
@pytest.mark.parametrize("lost_at, same", [(0, True), (2, False)])
def test_a_second_phase_is_trained_after_a_restart(
    lost_at: int, same: bool, begin: Callable[[int], None], tmp_path: Path
) -> None:
    """Its epochs 0 to 2 were left out, because the first phase had none left after epoch 2.

    Its steps counted from 0: the supervisor gave up a run that seemed to get no further.
    """
    begin(0)
    whole, _, steps = train(tmp_path / "whole", -1, same)
    assert steps == 2 * (3 + 4)
    begin(0)
    with pytest.raises(InterruptedError):
        train(tmp_path / "lost", lost_at, same)
    begin(1)
    lock._held.clear()  # As the kernel does for a process that is lost
    resumed, epochs, steps = train(tmp_path / "lost", -1, same)
    assert epochs == [*range(4)] and steps == 2 * (3 + 4)
    for one, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.extended
def test_elastic_averaging_continues_from_its_file(
    begin: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the loss of the centre the next generation began anew and replaced the file."""
    for module in (callback, snapshots):
        monkeypatch.setattr(module, "trains_alone", lambda model: True)
    for generation in range(2):
        begin(generation)
        model, data = compiled()
        parts = [cx.checkpoint.Checkpoint(tmp_path / "run"), Lost(-1 if generation else 2)]
        arguments = {"epochs": 3, "callbacks": parts, **OPTIONS}
        if generation:
            assert model.fit(data, data[:, :1], **arguments).epoch == [2]
        else:
            with pytest.raises(InterruptedError):
                model.fit(data, data[:, :1], **arguments)
    assert int(model.optimizer.iterations) == 2 * 3


def resumed_in_memory(folder: Path, lost_at: int) -> keras.Model:
    """Train four epochs of two steps, logged; be lost behind an epoch, before its save."""
    model, data = compiled()
    saving = cx.checkpoint.Checkpoint(folder / "run", memory_every=1)
    logger = keras.callbacks.CSVLogger(folder / "log.csv")
    parts = [logger, keras.callbacks.LambdaCallback(on_epoch_end=lost_behind(lost_at)), saving]
    try:
        model.fit(data, data[:, :1], epochs=4, callbacks=parts, **OPTIONS)
    finally:
        for thread in threading.enumerate():
            if thread.name == "tfcommx-snapshot":
                thread.join()
    return model


def lost_behind(lost_at: int) -> Callable[[int, object], None]:
    def on_epoch_end(epoch: int, logs: object) -> None:
        if epoch == lost_at:
            raise InterruptedError

    return on_epoch_end


@pytest.mark.extended
def test_a_folder_without_room_at_a_restart_does_not_lose_the_snapshots(
    begin: Callable[[int], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three generations ended before their first step, and with them the run and its memory.

    Its log had two rows of the epoch that was lost before its save.
    """
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    for folder in (whole, lost):
        folder.mkdir()
    begin(0)
    wanted = resumed_in_memory(whole, -1)
    begin(0)
    with pytest.raises(InterruptedError):
        resumed_in_memory(lost, 2)
    shutil.rmtree(lost / "run")
    (lost / "run").touch()  # No folder can be made there
    begin(1)
    lock._held.clear()
    resumed = resumed_in_memory(lost, -1)
    assert caplog.text.count("The run continues") == 2 and "It was the last save" in caplog.text
    for one, other in zip(wanted.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    logs = [(folder / "log.csv").read_text() for folder in (whole, lost)]
    assert logs[0] == logs[1] and logs[0].count("\n") == 5


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("patience", [1, 9], ids=["stopped", "no epoch left"])
def test_a_run_that_is_lost_behind_its_fit_ends_with_the_same_weights(
    patience: int, behind: bool, begin: Callable[[int], None], tmp_path: Path
) -> None:
    """It trained one more epoch if EarlyStopping had stopped it, and lost the best weights.

    A script that read its history, which was empty, ended with an error.
    """

    def train() -> tuple[dict[str, list[float]], list[np.ndarray]]:
        cx.init()
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer, loss="mse", jit_compile=False)
        data = np.arange(8, dtype=np.float32).reshape(4, 2)
        stopping = keras.callbacks.EarlyStopping(
            "loss", patience=patience, min_delta=1e9, restore_best_weights=True
        )
        parts = [cx.checkpoint.Checkpoint(tmp_path / "run"), stopping]
        options = {"callbacks": parts if behind else parts[::-1], "verbose": 0}
        trained = model.fit(data, data[:, :1], epochs=3, shuffle=False, **options)
        return {"epoch": trained.epoch, **trained.history}, model.get_weights()

    begin(0)
    history, weights = train()
    assert history["epoch"] == ([0, 1] if patience == 1 else [0, 1, 2])
    begin(1)
    again, resumed = train()
    assert again == history
    for one, other in zip(weights, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
