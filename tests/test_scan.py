"""The tile loops of all instruction sets agree: a processor runs only the fastest, so the others need a test of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_all_instruction_sets_agree(tmp_path):
    assert shutil.which("g++"), "set-up needs g++ as well: apt-get install g++"
    program = tmp_path / "scan_check"
    sources = [ROOT / "tests" / "scan_check.cc", *sorted((ROOT / "ops" / "kernels").glob("select_scan_*.cc"))]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'ops'}"]
    subprocess.run(["g++", *flags, *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and "checked portable" in done.stdout, done.stdout
