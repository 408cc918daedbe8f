"""What is installed or read must be ours: wheels of dist/, and a cache in a shared folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from launching import ROOT

from tfcommx.comm.launcher import cache_folder
from tfcommx.terms import PlanError

INSTRUCTIONS = (
    "docs/how-to/install.md",
    "scripts/examples/kubernetes/Containerfile",
    "scripts/verify/wheels.py",
)


@pytest.mark.parametrize("file", INSTRUCTIONS)
def test_wheels_are_installed_by_path(file: str) -> None:
    """With --find-links and a name, pip took a higher version from the registry."""
    lines = (ROOT / file).read_text().splitlines()
    assert not [line for line in lines if "--find-links" in line and "pip install" in line]
    assert not [line for line in lines if '"--find-links"' in line or "--find-links /" in line]


def test_a_cache_among_temporary_files_is_this_user_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could make the folder first, and with it what the next run reads."""

    def no_home() -> Path:
        raise RuntimeError("no home")

    for name in ("TFCOMMX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"tfcommx-{os.getuid()}"
    assert cache_folder() == folder and folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder
    folder.chmod(0o770)
    with pytest.raises(PlanError, match=r"mode 0700|must be a folder"):
        cache_folder()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(PlanError, match=r"mode 0700|must be a folder"):
        cache_folder()
