"""A rank that does not come ends the others, also while MPI's start holds Python's lock."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT

from tfcommx.launch.mpi_start import limited

# It sleeps in C without giving up Python's lock, as MPI's start does
START = """
import ctypes
from tfcommx.launch.mpi_start import limited
with limited(rank=2, local_rank=0, size=4, seconds=1):
    ctypes.PyDLL(None).sleep(30)
"""


def start_of_rank_2(folder: Path) -> tuple[float, int, str]:
    """Start rank 2 on a host of two, whose other one does not come."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PMIX_SERVER_TMPDIR": str(folder),
        "PMIX_NAMESPACE": "prterun-a@1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", START], env=environment, text=True, capture_output=True
    )
    return time.monotonic() - began, ended.returncode, ended.stderr


def test_a_missing_rank_of_this_host_is_named(tmp_path: Path) -> None:
    seconds, status, said = start_of_rank_2(tmp_path)
    assert status == -signal.SIGKILL and seconds < 60
    assert re.search(r"Rank 3 of 4 has not called init\(\) on \S+ within 1 s", said), said


def test_without_a_mark_it_is_a_rank_of_another_host(tmp_path: Path) -> None:
    (tmp_path / "tfcommx-prterun_a_1-1").touch()
    _, status, said = start_of_rank_2(tmp_path)
    assert status == -signal.SIGKILL and "A rank on another host of 4" in said, said


def test_a_start_in_time_leaves_nothing() -> None:
    began = time.monotonic()
    with limited(rank=0, local_rank=0, size=2, seconds=60):
        pass
    assert time.monotonic() - began < 30


def test_without_a_folder_of_the_launcher_no_mark_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lie in the root folder, and name ranks of a launch that follows."""
    marks: list[Path] = []
    monkeypatch.setattr(Path, "touch", lambda path: marks.append(path))
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", "")
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-a@1")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    with limited(rank=0, local_rank=0, size=2, seconds=60):
        pass
    assert not marks
