"""Measurements cached on disk: found by a key of all their inputs; damaged files are ignored."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tfcommx.launch.launcher import cache_folder
from tfcommx.optim import automatic

KEY = {"model": "abc", "hosts": ["red", "blue"], "batch": None}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFCOMMX_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_a_measurement_is_found_by_its_kind_and_key(kept: Path) -> None:
    assert automatic.read("choice", KEY) is None
    automatic.write("choice", KEY, {"chosen": "torus"})
    automatic.write("choice", KEY, {"chosen": "asa"})
    assert automatic.read("choice", KEY) == {"chosen": "asa"}
    assert automatic.read("links", KEY) is None
    assert automatic.read("choice", {**KEY, "batch": 32}) is None
    assert [path.suffix for path in kept.iterdir()] == [".json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"value": {}}', '{"key": 1}', "\x00"])
def test_a_damaged_file_is_ignored_with_a_warning(
    kept: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    automatic.write("choice", KEY, {})
    (path,) = kept.iterdir()
    path.write_text(text)
    assert automatic.read("choice", KEY) is None
    assert path.name in caplog.text


def test_a_folder_that_cannot_be_written_stops_nothing(
    kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        automatic.write("choice", KEY, {})
    assert "cannot be written" in caplog.text


def test_where_they_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFCOMMX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/tfcommx")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tfcommx"


def test_a_digit_that_has_changed_is_noticed(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plan with another density was taken as the measured one."""
    automatic.write("choice", KEY, {"density": 0.01})
    (path,) = kept.iterdir()
    path.write_text(path.read_text().replace("0.01", "0.81"))
    assert automatic.read("choice", KEY) is None and path.name in caplog.text


def test_a_cache_that_is_no_folder_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 ended after its trial, alone, and the others waited for it."""
    monkeypatch.setenv("TFCOMMX_CACHE", "gs://bucket/cache")
    automatic.write("choice", KEY, {})
    assert "gs://bucket/cache" in caplog.text
