"""Environments of other frameworks: an interrupted installation is repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from bench import environments


def test_an_interrupted_installation_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call took an environment without its packages, and ended with an ImportError."""
    calls = []

    def run(words: list[object], check: bool) -> None:
        calls.append(words[2])
        assert check
        if "venv" in words:
            (tmp_path / "env").mkdir(exist_ok=True)
        elif interrupted:
            raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(environments.subprocess, "run", run)
    interrupted = True
    with pytest.raises(subprocess.CalledProcessError):
        environments.python_with(tmp_path / "env", ("one",))
    interrupted = False
    for packages in (("one",), ("one",), ("one", "two")):
        python = environments.python_with(tmp_path / "env", packages)
        assert python == tmp_path / "env" / "bin" / "python"
    assert calls == ["venv", "pip", "pip", "pip"]
    # Modules that were compiled for another Python do not load
    monkeypatch.setattr(environments.sys, "version", "another")
    environments.python_with(tmp_path / "env", ("one",))
    assert calls[4] == "venv"


def test_a_list_that_is_cut_by_head_ends_without_a_traceback() -> None:
    """It ended with BrokenPipeError, as after `python scripts/bench --list | head -1`."""
    command = '"$0" scripts/bench --list | true; exit ${PIPESTATUS[0]}'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=ROOT, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (141, "")
