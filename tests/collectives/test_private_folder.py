"""Folders in /tmp and /dev/shm are used only if no other user can have put anything there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfcommx.checkpoint.place import SnapshotFolder
from tfcommx.core import ConfigurationError
from tfcommx.core.files import open_private
from tfcommx.launch import launcher


def of_another_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def a_link(path: Path) -> None:
    target = path.with_name("target")
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
WRONG = pytest.mark.parametrize(
    "make", [pytest.param(of_another_user, marks=root), open_to_all, a_link, a_dangling_link]
)


def test_a_folder_is_made_once_and_its_owner_alone_can_use_it(tmp_path: Path) -> None:
    for _ in range(2):
        path = tmp_path / "ours"
        os.close(open_private(path))
        assert path.stat().st_mode & 0o777 == 0o700


@WRONG
def test_measurements_are_not_read_from_a_folder_of_others(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without a home keeps them in /tmp, under a name that all others can guess."""

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("TFCOMMX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(launcher.Path, "home", no_home)
    monkeypatch.setattr(launcher.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"tfcommx-{os.getuid()}"
    make(folder)
    with pytest.raises(ConfigurationError, match="TFCOMMX_CACHE"):
        launcher.cache_folder()
    folder.unlink() if folder.is_symlink() else folder.rmdir()
    assert launcher.cache_folder() == folder


@WRONG
def test_snapshots_are_not_kept_in_a_folder_of_others(make, tmp_path: Path) -> None:
    """Its name is on command lines that horovodrun writes."""
    memory = tmp_path / "tfcommx-0-5f0c-node1"
    make(memory)
    with pytest.raises(OSError):
        SnapshotFolder(memory, Path("run")).make()
