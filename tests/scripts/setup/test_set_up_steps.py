"""The set-up deletes no files of others, and repeats a step that was interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "setup"))
import tools
from tools import Environment


def set_up(folder: Path) -> subprocess.CompletedProcess[str]:
    """Call the set-up, which ends at the first package, because pip has no index."""
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "setup"],
        capture_output=True,
        text=True,
        env={**os.environ, "TFCOMMX_VENV": str(folder), "PIP_NO_INDEX": "1"},
    )


def test_files_of_others_are_not_deleted(tmp_path: Path) -> None:
    """TFCOMMX_VENV=$HOME emptied the home directory: `venv --clear` takes any folder."""
    (tmp_path / "thesis.tex").write_text("years of work")
    ended = set_up(tmp_path)
    assert ended.returncode == 2 and str(tmp_path) in ended.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.extended
def test_an_environment_of_the_set_up_is_made_anew(tmp_path: Path) -> None:
    """Also if it was interrupted before pip was installed."""
    folder = tmp_path / "venv"
    Environment(folder).stamps.mkdir(parents=True)
    (folder / "half").touch()
    ended = set_up(folder)
    assert ended.returncode == 1 and "pip" in ended.stderr, ended.stderr
    assert not (folder / "half").exists() and (folder / "bin" / "pip").exists()


def test_a_step_that_was_interrupted_is_repeated_with_its_former_inputs(tmp_path: Path) -> None:
    environment, done = Environment(tmp_path), list[str]()

    def step(key: str, fails: bool = False) -> None:
        def work() -> None:
            done.append(key)
            if fails:
                raise KeyboardInterrupt

        environment.step("packages", "packages", key, work, lambda: True)

    step("old")
    step("old")
    with pytest.raises(KeyboardInterrupt):
        step("new", fails=True)
    step("old")
    assert done == ["old", "new", "old"]


def test_another_users_clone_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its native library could not be written, and the set-up failed after building Horovod."""
    monkeypatch.setattr(tools.os, "access", lambda *_: False)
    done = list[str]()
    with pytest.raises(tools.Missing, match=str(tools.ROOT)):
        Environment(tmp_path).step("packages", "", "", lambda: done.append("packages"), bool)
    assert not done
