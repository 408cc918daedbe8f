"""Files that compilers write for tests, in build/tests: made again only if a source has changed.

Compiling takes some 25 CPU seconds, which each `make test` would repeat.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from launching import ROOT

FOLDER = ROOT / "build" / "tests"
SUFFIXES = {".cc", ".cu", ".h", ".inl"}
KEPT_SECONDS = 14 * 24 * 3600  # after the last use


@functools.cache
def sources() -> str:
    """Return a hash of all native sources, each of which may include any other."""
    found = hashlib.sha256()
    for folder in ("ops", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in SUFFIXES:
                found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


@functools.cache
def version(compiler: str) -> str:
    """Return a compiler's path and version."""
    path = shutil.which(compiler)
    assert path, f"set-up needs {compiler} as well: apt-get install {compiler}"
    said = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
    return f"{path}\n{said}"


def compiled(command: list[str], name: str) -> Path:
    """Return the file that a compiler writes with `-o`; its inputs are files of this tree.

    Args:
        command: the compiler and its words, without `-o`.
        name: of the file.
    """
    facts = "\n".join([version(command[0]), sources(), *command])
    file = FOLDER / hashlib.sha256(facts.encode()).hexdigest()[:16] / name
    if not file.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        remove_unused()
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            made = Path(folder) / name
            done = subprocess.run([*command, "-o", made], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            file.parent.mkdir(exist_ok=True)
            made.replace(file)  # Another process may have made the same one
    os.utime(file.parent)
    return file


def remove_unused() -> None:
    for folder in FOLDER.iterdir():
        # Another thread or process may have removed it, as the one in which it compiled
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
