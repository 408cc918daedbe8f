"""The examples in the package's docstrings return the values shown."""

from __future__ import annotations

import os
import subprocess
import sys

import warm_ranks
from launching import QUICK, ROOT


def test_every_example_in_a_docstring() -> None:
    """All modules in one process, which is not this one: examples call init()."""
    ended = subprocess.run(
        [sys.executable, "tests/workers/run_examples.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(alone=True)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    assert int(ended.stdout.split()[-4]) > 0, ended.stdout
