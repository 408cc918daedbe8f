"""Saves of an earlier run that a new one would replace or delete without a word."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import tfcommx as cx

Fit = Callable[..., list[str]]


def make() -> keras.Model:
    cx.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="last")])
    model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    return model


@pytest.fixture
def fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Fit:
    def fit(model: keras.Model, first: int, epochs: int, folder: str = "run") -> list[str]:
        """Return the warnings of a `fit`."""
        caplog.clear()
        callbacks = [cx.callbacks.BroadcastState(), cx.checkpoint.Checkpoint(tmp_path / folder)]
        ones = np.ones((4, 2)), np.ones((4, 1))
        model.fit(*ones, epochs=epochs, initial_epoch=first, callbacks=callbacks, verbose=0)
        return [record.message for record in caplog.records if "replace" in record.message]

    return fit


def copied(tmp_path: Path, name: str) -> Path:
    """Return a copy of the folder, whose saves are those of another process."""
    return Path(shutil.copytree(tmp_path / "run", tmp_path / name))


def test_a_run_that_begins_anew_in_a_used_folder_is_warned(fit: Fit, tmp_path: Path) -> None:
    assert not fit(make(), 0, 3)
    copied(tmp_path, "used")
    (message,) = fit(make(), 0, 1, "used")
    assert "used holds a save of 3 epochs" in message and "begins after 0:" in message


def test_a_run_that_restores_but_forgets_its_first_epoch_is_warned(
    fit: Fit, tmp_path: Path
) -> None:
    fit(make(), 0, 2)
    model = make()
    cx.checkpoint.restore(model, copied(tmp_path, "used"))
    assert len(fit(model, 0, 1, "used")) == 1


def test_a_run_that_continues_is_not_warned(fit: Fit, tmp_path: Path) -> None:
    model = make()
    fit(model, 0, 2)
    assert not fit(model, 0, 1), "the second phase of one program"
    model = make()
    first = cx.checkpoint.restore(model, copied(tmp_path, "used"))
    assert first == 1
    assert not fit(model, first, 2, "used")


def test_saves_without_checkpoint_json_are_named(
    fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(make(), 0, 2)
    folder = copied(tmp_path, "partial")
    (folder / "checkpoint.json").unlink()
    caplog.clear()
    assert cx.checkpoint.restore(make(), folder) == 0
    assert "partial has tfcommx-0001.keras" in caplog.text
    caplog.clear()
    assert cx.checkpoint.restore(make(), tmp_path / "new") == 0 and not caplog.records
