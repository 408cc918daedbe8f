"""A save for which there is no room: the one before stays whole, and the run continues."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
from drawing import case

import tfcommx as cx

WIDTH = 512


@contextlib.contextmanager
def room_for(count: int) -> Iterator[None]:
    """Let the kernel refuse files of more bytes, as a full disk refuses any."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=["synchronous", case("elastic_averaging", kept=False)])
def model(request: pytest.FixtureRequest) -> keras.Model:
    """Return a compiled model. With elastic averaging a full disk ended the run."""
    cx.init()
    model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01), strategy=request.param)
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("room", [100, 5_000, 500_000])
def test_a_save_without_room_leaves_the_one_before(
    room: int, model: keras.Model, tmp_path: Path
) -> None:
    cx.checkpoint.save(model, tmp_path, 0)
    before = names(tmp_path)
    with room_for(room), pytest.raises(cx.checkpoint.SaveError, match=r"rank 0: .*too large"):
        cx.checkpoint.save(model, tmp_path, 1)
    assert names(tmp_path) == before
    assert cx.checkpoint.restore(model, tmp_path) == 1
    cx.checkpoint.save(model, tmp_path, 1)
    assert cx.checkpoint.restore(model, tmp_path) == 2


def test_a_run_goes_on_and_ends_after_three_failures_in_a_row(
    model: keras.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    epochs_without_room = {1, 3, 4, 6, 7, 8}
    opened = contextlib.ExitStack()

    class Room(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            opened.close()
            if epoch in epochs_without_room:
                opened.enter_context(room_for(5_000))

    data = np.zeros((4, WIDTH), np.float32)
    callbacks = [Room(), cx.checkpoint.Checkpoint(tmp_path)]
    with opened, pytest.raises(cx.checkpoint.SaveError):
        model.fit(data, data, epochs=20, verbose=0, callbacks=callbacks)
    # TensorFlow may warn of traces
    ours = [record for record in caplog.records if record.name == "tfcommx"]
    assert len(ours) == 5  # Epochs 1, 3, 4, 6 and 7; the failure in 8 ends the run
    assert cx.checkpoint.next_epoch(tmp_path) == 6


def test_the_last_save_of_a_fit_is_not_tried_again(
    model: keras.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log said that the run continues, although `fit` ended."""
    data = np.zeros((4, WIDTH), np.float32)
    saving = cx.checkpoint.Checkpoint(tmp_path)
    with room_for(5_000):
        model.fit(data, data, epochs=2, verbose=0, callbacks=[saving])
    continues = ["The run continues" in record.message for record in caplog.records]
    assert continues == [True, False] and "last save" in caplog.records[-1].message


def test_a_folder_that_has_gone_is_made_again(model: keras.Model, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cx.checkpoint.save(model, folder, 0)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    cx.checkpoint.save(model, folder, 1)
    assert cx.checkpoint.restore(model, folder) == 2
