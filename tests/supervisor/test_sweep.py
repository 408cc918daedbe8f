"""The sweep of one run does not remove another run's files in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfcommx.checkpoint.place import SnapshotFolder
from tfcommx.supervisor import sweep

DAYS = 3 * 24 * 3600.0
# Holds a folder as a rank does, until its input ends
HOLD = (
    "import fcntl, os, sys; folder = os.open(sys.argv[1], os.O_RDONLY);"
    "fcntl.flock(folder, fcntl.LOCK_SH); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that has not written for days; no process has its name."""
    monkeypatch.setattr(sweep, "MEMORY", tmp_path)
    folder = tmp_path / f"tfcommx-{os.getuid()}-0123456789abcdef-node1"
    SnapshotFolder(folder, Path("run")).path.mkdir(parents=True)
    folder.chmod(0o700)
    long_ago = time.time() - DAYS
    for path in (*folder.iterdir(), folder):
        os.utime(path, (long_ago, long_ago))
    return folder


def test_a_run_that_cannot_be_seen_keeps_its_snapshots(memory: Path) -> None:
    """A run in another container with the same /dev/shm lost its snapshots.

    The sweep looked for the run's processes in /proc, which shows only those of the same container.
    """
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as hidden:
        assert hidden.stdout and hidden.stdout.readline() == b"held\n"
        sweep.remove_stale_memory()
        assert memory.is_dir()
        hidden.kill()
    sweep.remove_stale_memory()
    assert not memory.exists()


def test_a_run_keeps_its_old_snapshots_between_generations(memory: Path) -> None:
    """The sweep of a generation that had hung for an hour removed the run's own snapshots."""
    sweep.sweep("0123456789abcdef", "0")
    assert memory.is_dir()
    sweep.remove_stale_memory()  # As the supervisor of another run does
    assert memory.is_dir()
    sweep.sweep("0123456789abcdef")
    assert not memory.exists()


def test_a_process_holds_the_folder_as_long_as_it_uses_it(memory: Path) -> None:
    place = SnapshotFolder(memory, Path("run"))
    place.path.chmod(0o700)
    place.make()
    sweep.remove_stale_memory()
    assert memory.is_dir()


def test_the_folder_of_another_user_and_a_link_stay(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "elsewhere"
    memory.rename(target)
    memory.symlink_to(target)
    sweep.remove_stale_memory()
    assert target.is_dir()
    if os.geteuid() == 0:
        memory.unlink()
        target.rename(memory)
        os.chown(memory, 12345, 12345)
        sweep.remove_stale_memory()
        assert memory.is_dir()
