"""Writing a snapshot: its folder may have been removed, and each failure is reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tfcommx.checkpoint.files import Head
from tfcommx.checkpoint.place import SnapshotFolder, head_array
from tfcommx.checkpoint.snapshots import Captured, Written, write_snapshot


def write(place: SnapshotFolder, save: int) -> Written:
    own = {"head": head_array(Head(save, -1, 1, 5, 12, {}))}
    captured = Captured(save, own, {"weight0": np.ones(3)}, False)
    return write_snapshot(captured, 0, place, None, None)


def test_a_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    """Once, a rank ended when its host's memory files had been deleted beside it."""
    memory = tmp_path / "memory"
    place = SnapshotFolder(memory, Path("run"))
    assert not write(place, 1).problem
    shutil.rmtree(memory)
    again = write(place, 2)
    assert not again.problem and again.bytes > 0
    assert list(place.held()) == [2]
    # It cannot be made where its own parent is gone: said, not raised
    nowhere = SnapshotFolder(tmp_path / "gone" / "memory", Path("run"))
    assert "No such file" in write(nowhere, 3).problem


def test_a_diverged_model_does_not_replace_the_snapshot_before(tmp_path: Path) -> None:
    """A NaN was mirrored, and the snapshot before it deleted: a restart continued from NaN."""
    place, model = SnapshotFolder(tmp_path / "memory", Path("run")), {"weight0": np.ones(3)}

    def captured(save: int, last: float, finite: tuple[str, ...]) -> Captured:
        own = {"head": head_array(Head(save, -1, 1, 5, 12, {}))}
        diverged = {**model, "weight1": np.array([1, last]), "weight2": np.array([2], np.int32)}
        return Captured(save, own, diverged, False, finite)

    paths, sent = ("first", "last/kernel", "count"), []
    for save, value, keep in ((1, 0.0, None), (2, np.nan, 1), (3, np.inf, 1)):
        files = lambda names, _: sent.append(names)  # noqa: E731
        written = write_snapshot(captured(save, value, paths), 0, place, files, keep)
        assert ("last/kernel" in written.problem) == (save > 1)
    assert list(place.held()) == [1] and len(sent) == 1
    # A mask's weights are infinite by intention
    written = write_snapshot(captured(4, -np.inf, ()), 0, place, None, 1)
    assert not written.problem and list(place.held()) == [1, 4]


def test_any_failure_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ended with a MemoryError had no problem: its snapshot counted as whole."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "savez", fail)
    assert write(SnapshotFolder(tmp_path / "memory", Path("run")), 1).problem == "MemoryError"
