"""TensorFlow is loaded without its start-up messages, and nothing else is held back."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

LOUD = """
import os
os.write(2, b"I0000 00:00:17.45  25 port.cc:153] oneDNN custom operations are on.\\n")
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called ...\\n")
os.write(2, b"the disk is full\\n")
"""


def load(folder: Path, tensorflow: str) -> subprocess.CompletedProcess[str]:
    """Load a module of this source in place of TensorFlow, in another process."""
    (folder / "tensorflow.py").write_text(tensorflow)
    return subprocess.run(
        [sys.executable, "-c", "from tfcommx.cli import environment as e; e.load_tensorflow()"],
        env={"PYTHONPATH": f"{folder}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
    )


def test_what_else_is_written_meanwhile_is_shown(tmp_path):
    ended = load(tmp_path, LOUD)
    assert ended.returncode == 0 and ended.stderr == "the disk is full\n"


def test_an_import_that_fails_shows_everything_that_was_written(tmp_path):
    ended = load(tmp_path, f"{LOUD}\nraise ImportError('no library')\n")
    assert "the disk is full" in ended.stderr and "no library" in ended.stderr


def test_an_import_that_aborts_the_process_is_named(tmp_path):
    """The process ended without a word, because its messages were in a temporary file."""
    ended = load(tmp_path, f"{LOUD}\nos.abort()\n")
    assert ended.returncode == -signal.SIGABRT and "tensorflow.py" in ended.stderr


def test_garbage_is_collected_again_after_the_import_and_only_if_it_was_before(tmp_path):
    (tmp_path / "tensorflow.py").write_text("import gc\nassert not gc.isenabled()\n")
    for before in ("enable", "disable"):
        code = (
            f"import gc; gc.{before}(); from tfcommx.cli import environment as e; "
            "e.load_tensorflow(); print(gc.isenabled())"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stdout == f"{before == 'enable'}\n"
