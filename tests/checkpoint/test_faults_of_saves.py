"""Faults of the files of a checkpoint: errors after the name was written, files of another save."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfcommx as cx
from tfcommx.checkpoint import files, lock, saving
from tfcommx.checkpoint.files import HEAD, model_name, read_own_head, residuals_name
from tfcommx.core import files as core_files


@pytest.fixture(params=["synchronous", "elastic_averaging"])
def model(request: pytest.FixtureRequest) -> keras.Model:
    return compiled(request.param)


@pytest.fixture
def small() -> keras.Model:
    return compiled("synchronous")


def compiled(strategy: str) -> keras.Model:
    cx.init()
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01, 0.9), strategy=strategy)
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def of_system(code: int) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("saves", [0, 1])
def test_a_save_that_fails_behind_its_name_leaves_the_one_before(
    saves: int, model: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """checkpoint.json named the new save, whose files were removed: none could be restored."""
    for epoch in range(saves):
        cx.checkpoint.save(model, tmp_path, epoch)
    before, put_in_place = names(tmp_path), core_files.put_in_place

    def named_and_failed(part: Path, path: Path) -> None:
        put_in_place(part, path)
        if path.name == HEAD:  # As if the folder could not be written to the disk
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(core_files, "put_in_place", named_and_failed)
        with pytest.raises(cx.checkpoint.SaveError, match=r"rank 0: .*Errno 5"):
            cx.checkpoint.save(model, tmp_path, saves)
    assert names(tmp_path) - before <= {".checkpoint.lock"}
    assert cx.checkpoint.restore(model, tmp_path) == saves
    cx.checkpoint.save(model, tmp_path, saves)
    assert cx.checkpoint.restore(model, tmp_path) == saves + 1


def test_a_name_that_cannot_be_taken_back_keeps_its_files(
    model: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cx.checkpoint.save(model, tmp_path, 0)
    write_head = files.write_head

    def written_and_refused(head: files.Head, folder: Path) -> None:
        write_head(head, folder)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_head", written_and_refused)
        patch.setattr(files, "write_head", of_system(errno.EIO))
        with pytest.raises(cx.checkpoint.SaveError, match=r"rank 0: .*Errno 5"):
            cx.checkpoint.save(model, tmp_path, 1)
    assert cx.checkpoint.restore(model, tmp_path) == 2


def test_a_file_of_another_save_is_refused(small: keras.Model, tmp_path: Path) -> None:
    """A file of an earlier run on a node's own disk was read: its residuals were another model's.

    Both runs had written a save of that number.
    """
    for run in ("first", "second"):
        cx.checkpoint.save(small, tmp_path / run, 0)
    foreign = tmp_path / "first" / residuals_name(0, 0)
    shutil.copy(foreign, tmp_path / "second")
    with pytest.raises(cx.CheckpointError, match=rf"second/{foreign.name}.*tag"):
        cx.checkpoint.restore(small, tmp_path / "second")
    assert cx.checkpoint.restore(small, tmp_path / "first") == 1
    # The older save is taken, because two are kept
    cx.checkpoint.save(small, tmp_path / "first", 1, keep=2)
    shutil.copy(foreign, tmp_path / "first" / residuals_name(1, 0))
    assert cx.checkpoint.restore(small, tmp_path / "first") == 1


@pytest.mark.parametrize(("field", "value"), [("epoch", 6), ("step", 3), ("ranks", 1), ("tag", "")])
def test_one_digit_of_the_head_is_noticed(
    field: str, value: object, small: keras.Model, tmp_path: Path
) -> None:
    """One flipped bit made 2 epochs into 6, and the run left out four."""
    cx.checkpoint.save(small, tmp_path, 2, step=1, steps=9)
    head = json.loads((tmp_path / HEAD).read_text())
    changes = head[field] != value
    (tmp_path / HEAD).write_text(json.dumps(head | {field: value}))
    if changes and field != "tag":
        with pytest.raises(cx.CheckpointError, match=residuals_name(0, 0)):
            cx.checkpoint.restore(small, tmp_path)
    else:  # A head that the user has written has no tag
        assert cx.checkpoint.restore(small, tmp_path) == 3


def test_a_file_that_cannot_be_deleted_does_not_end_the_run(
    model: keras.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The save was complete, and then the run ended, on one rank alone."""
    cx.checkpoint.save(model, tmp_path, 0)
    (tmp_path / model_name(0)).unlink()
    (tmp_path / model_name(0)).mkdir()
    cx.checkpoint.save(model, tmp_path, 1)
    assert model_name(0) in caplog.text
    assert cx.checkpoint.restore(model, tmp_path) == 2


def test_a_lock_that_another_run_has_taken_is_no_lack_of_room(
    small: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said that a checkpoint needs room, with the bytes of the weights and those free."""

    def in_use(*_: object) -> None:
        raise lock.FolderInUse("another run saves. End it.")

    cx.checkpoint.save(small, tmp_path, 0)
    monkeypatch.setattr(lock, "take", in_use)
    with pytest.raises(cx.checkpoint.SaveError, match=r"rank 0: another run.*\bit\. An") as caught:
        cx.checkpoint.save(small, tmp_path, 1)
    assert "room" not in str(caught.value) and "bytes" not in str(caught.value)


def test_the_files_of_a_model_checkpoint_in_the_folder_stay(
    model: keras.Model, tmp_path: Path
) -> None:
    """They were deleted without a word, or replaced: model-0001.keras was also this package's."""
    theirs = [tmp_path / f"model-{epoch:04d}.keras" for epoch in range(3)]
    for path in theirs:
        path.write_text("the user's")
    for epoch in range(3):
        cx.checkpoint.save(model, tmp_path, epoch)
    assert [path.read_text() for path in theirs] == ["the user's"] * 3
    (ours,) = set(tmp_path.glob("*.keras")) - set(theirs)
    assert ours.name == model_name(2)


@pytest.mark.parametrize("kind", ["folder", "broken link", "loop", "stale"])
def test_a_head_that_cannot_be_read_is_no_missing_checkpoint(
    kind: str, small: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a disk that was not mounted, or a folder, counted as none: the run began anew.

    Other errors were raised on one rank alone, and a save at that moment ended the run.
    """
    cx.checkpoint.save(small, tmp_path, 0)
    head = (tmp_path / HEAD).read_bytes()
    if kind != "stale":
        (tmp_path / HEAD).unlink()
    match kind:
        case "folder":
            (tmp_path / HEAD).mkdir()
        case "broken link":
            (tmp_path / HEAD).symlink_to("/nowhere/checkpoint.json")
        case "loop":
            (tmp_path / HEAD).symlink_to(HEAD)
        case "stale":
            monkeypatch.setattr(Path, "read_text", of_system(errno.ESTALE))
    for read in (cx.checkpoint.last, cx.checkpoint.next_epoch):
        with pytest.raises(cx.CheckpointError, match=rf"rank 0: .*{tmp_path}"):
            read(tmp_path)
    with pytest.raises(cx.checkpoint.SaveError, match=r"rank 0\b"):
        cx.checkpoint.save(small, tmp_path, 1)
    monkeypatch.undo()
    if kind == "folder":
        (tmp_path / HEAD).rmdir()
    (tmp_path / HEAD).unlink(missing_ok=True)
    (tmp_path / HEAD).write_bytes(head)
    assert cx.checkpoint.restore(small, tmp_path) == 1


def test_a_full_disk_whose_size_is_unknown_is_a_failed_save(
    small: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of counting free bytes was raised on one rank, in front of a gather."""
    cx.checkpoint.save(small, tmp_path, 0)
    monkeypatch.setattr(saving.shutil, "disk_usage", of_system(errno.ESTALE))
    monkeypatch.setattr(saving, "_write_model", of_system(errno.ENOSPC))
    with pytest.raises(cx.checkpoint.SaveError, match=r"rank 0: .*Errno 28"):
        cx.checkpoint.save(small, tmp_path, 1)


@pytest.mark.parametrize("name", [b"caf\xe9", "ä b'\"$x".encode(), b"x" * 255], ids=str)
def test_a_folder_of_any_name(name: bytes, small: keras.Model, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(name)
    cx.checkpoint.save(small, folder, 0)
    assert cx.checkpoint.restore(small, folder) == 1
    assert files.why_not_writable(folder) is None
    (tmp_path / "link").symlink_to("/nowhere/run")
    assert "/nowhere/run" in (files.why_not_writable(tmp_path / "link") or "")


def test_states_of_recurrent_layers_are_restored(tmp_path: Path) -> None:
    """A restored model with stateful=True began its sequences anew, without a word."""
    cx.init()

    def built() -> keras.Model:
        net = keras.Sequential(
            [keras.Input(batch_shape=(2, 3, 4)), keras.layers.LSTM(5, stateful=True)]
        )
        optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
        net.compile(optimizer, "mse", jit_compile=False)
        return net

    net, again = built(), built()
    data = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    net.fit(data, np.ones((2, 5)), verbose=0)
    cx.checkpoint.save(net, tmp_path, 0)
    cx.checkpoint.restore(again, tmp_path)
    states = [[state.numpy() for state in one.layers[0].states] for one in (net, again)]
    assert np.any(states[0][0]) and all(map(np.array_equal, *states))
    np.testing.assert_array_equal(net.predict(data, verbose=0), again.predict(data, verbose=0))


def test_a_folder_without_rights_is_an_error_of_all(
    small: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind root-squash, PermissionError was raised on one rank, in front of a gather."""
    stat = os.stat

    def refuse(path: object, **options: object) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    cx.checkpoint.save(small, tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        patch.setattr(Path, "read_text", of_system(errno.EACCES))
        with pytest.raises(cx.CheckpointError, match=r"rank 0: .*Errno 13"):
            cx.checkpoint.restore(small, tmp_path)


@pytest.mark.parametrize(
    "odd",
    [
        {"keep": 0},
        {"epoch": -2},
        {"step": -1},
        {"steps": 1.5},
        {"notes": {"loss": {1, 2}}},
        {"notes": {np.nan: 1}},
    ],
)
def test_values_that_no_checkpoint_can_hold_are_refused_before_a_file_is_written(
    odd: dict[str, Any], model: keras.Model, tmp_path: Path
) -> None:
    """keep=0 kept all saves but one; notes failed only on ranks that write checkpoint.json."""
    with pytest.raises(cx.ConfigurationError, match=f"`{next(iter(odd))}`"):
        cx.checkpoint.save(model, tmp_path, **{"epoch": 0, **odd})
    assert names(tmp_path) == set()


def test_numbers_of_numpy_are_numbers_of_a_checkpoint(small: keras.Model, tmp_path: Path) -> None:
    """The residuals' head was no JSON, and a TypeError left the model's file behind."""
    for epoch in np.arange(2):
        cx.checkpoint.save(small, tmp_path, epoch, step=np.int32(3))
    head = cx.checkpoint.last(tmp_path)
    assert head and (head.epoch, head.step) == (1, 3)


def test_the_end_of_a_training_is_saved_for_a_rank_that_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With elastic averaging rank 0 died when rank 1 had ended its epochs: none saved the last."""
    comm, gone = cx.init(), []
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="elastic_averaging")
    model.compile(optimizer, loss="mse", jit_compile=False)
    monkeypatch.setattr(comm, "rank", 1)
    monkeypatch.setattr(saving, "_first_rank", lambda: 1 if gone else 0)
    dies = keras.callbacks.LambdaCallback(on_train_end=lambda logs: gone.append(0))
    data = np.ones((4, 2), np.float32)
    parts = [dies, cx.checkpoint.Checkpoint(tmp_path)]
    model.fit(data, data[:, :1], epochs=3, verbose=0, callbacks=parts)
    assert read_own_head(tmp_path).epoch == 2
