"""Which callbacks conflict with those of other ranks; on one rank."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import keras
import pytest

from tfcommx import callbacks
from tfcommx.callbacks.beside import conflicts_of, warn_of_conflicts

NONE = ([], False, [])


def warnings(caplog: pytest.LogCaptureFixture, *rows: tuple) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tfcommx"):
        warn_of_conflicts(rows)
    return caplog.messages


def test_ranks_that_write_one_file_are_told(caplog: pytest.LogCaptureFixture) -> None:
    rows = [([], False, [("CSVLogger", path)]) for path in ("/run/a.csv", "/run/b.csv")]
    (text,) = warnings(caplog, rows[0], NONE, rows[0], rows[1])
    assert "2 ranks" in text and "0 and 2" in text
    assert not warnings(caplog, rows[0])  # One rank


def test_callbacks_are_known_by_class_and_position(tmp_path: Path) -> None:
    named = keras.callbacks
    best = named.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True)
    each = named.ModelCheckpoint("gs://bucket/each.keras")
    board = named.TensorBoard(tmp_path / "board")
    first, stop, nan = callbacks.BroadcastState(), named.EarlyStopping(), named.TerminateOnNaN()

    def of(*listed: keras.callbacks.Callback, in_lock_step: bool = True) -> tuple:
        return conflicts_of(listed, callbacks.BroadcastState, in_lock_step)

    early, stops_alone, files = of(stop, best, each, first, nan, board)
    assert (early, stops_alone) == (["EarlyStopping", "ModelCheckpoint"], True)
    paths = [str(tmp_path / "best.keras"), "gs://bucket/each.keras", str(tmp_path / "board")]
    assert [file[1] for file in files] == paths
    assert of(stop, first, nan, in_lock_step=False)[:2] == ([], False)
    agreed = callbacks.AgreeOnStop()
    assert of(callbacks.AverageMetrics(), stop, first, nan, agreed) == NONE
    assert of(first, agreed, nan)[1] and of(nan)[:2] == ([], True)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_callbacks_are_copied_after_a_run(make: Callable[[object], object]) -> None:
    """As tuners do, which copy the callbacks for each trial: ChooseAgain held a weak set."""
    first = callbacks.Standard(keras.callbacks.EarlyStopping("loss"))
    for callback in first.callbacks:
        if isinstance(callback, callbacks.ChooseAgain):
            callback.on_train_begin()
    copied = make(first)
    assert [type(part) for part in copied.callbacks] == [type(part) for part in first.callbacks]
