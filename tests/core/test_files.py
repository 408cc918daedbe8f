"""Paths that are refused, and files that are written whole or not at all."""

from __future__ import annotations

import os
import re
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from tfcommx.core import ConfigurationError, local_path, replacing, write_text
from tfcommx.core.files import open_private


@pytest.mark.parametrize(
    "path",
    [
        "gs://my-bucket/run",
        "s3://my-bucket/run",
        "hdfs://name-node:9000/run",
        "abfss://files@account.dfs.core.windows.net/run",
        "https://host/run",
        "file:///tmp/run",
        "GS://my-bucket/run",
        Path("gs://my-bucket/run"),  # Which is gs:/my-bucket/run
        "$SCRATCH/run",
        "${SCRATCH}/run",
        "~no-such-user/run",
        "",
        None,
        3,
    ],
)
def test_what_is_no_path_of_a_file_system_is_refused(path: Any) -> None:
    received = repr(str(path) if isinstance(path, Path) else path)
    with pytest.raises(ConfigurationError, match=f"`folder`.* {re.escape(received)}"):
        local_path("folder", path)


@pytest.mark.parametrize("path", ["run", "./gs:/run", "/a b/run", "a:b", "run-12:30", "c:/run"])
def test_other_paths_stay(path: str) -> None:
    assert local_path("folder", path) == Path(path)


def test_the_home_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Checkpoint("~/run")` saved into a folder called `~` of the working directory."""
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path("folder", "~/run") == Path("/home/me/run")


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    """A file of measured links was cut: it was opened for writing, and then there was no room."""
    path = tmp_path / "links.json"
    write_text(path, "what took an hour to measure")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        # The error of a write names no file
        with pytest.raises(OSError, match=r"too large: .*links\.json"):
            write_text(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "what took an hour to measure"
    assert os.listdir(tmp_path) == ["links.json"]


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "links.json").symlink_to(tmp_path / "shared" / "links.json")
    write_text(tmp_path / "links.json", "new")
    assert (tmp_path / "links.json").is_symlink()
    assert (tmp_path / "shared" / "links.json").read_text() == "new"
    write_text("/dev/null", "gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figure.png"
    with replacing(path) as first, replacing(path) as second:
        assert first != second and first.suffix == ".png"
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # Which was closed last
    assert os.listdir(path.parent) == ["figure.png"]


def test_a_private_folder(tmp_path: Path) -> None:
    os.close(open_private(tmp_path / "mine"))
    os.close(open_private(tmp_path / "mine"))
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700
    (tmp_path / "mine").chmod(0o750)
    with pytest.raises(PermissionError, match="0750"):
        open_private(tmp_path / "mine")


@pytest.mark.parametrize("name", ["x" * 251 + ".txt", "ä" * 127 + "x", "x" * 240 + ".keras"])
def test_a_file_has_the_longest_name(name: str, tmp_path: Path) -> None:
    """The name of its part, with a random text, was too long."""
    write_text(tmp_path / name, "first")
    write_text(tmp_path / name, "second")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "second"


def test_a_rename_that_nfs_has_carried_out_twice_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was sent again, because its first answer was lost."""
    replace = os.replace

    def replace_twice(part: Path, path: Path) -> None:
        replace(part, path)
        replace(part, path)

    monkeypatch.setattr(os, "replace", replace_twice)
    write_text(tmp_path / "a", "written")
    assert (tmp_path / "a").read_text() == "written"
    monkeypatch.setattr(os, "replace", lambda part, path: replace(tmp_path / "none", path))
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "a", "lost")
    assert (tmp_path / "a").read_text() == "written"
