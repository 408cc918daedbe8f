"""Tools shared by all parts of the set-up: run a command, hash inputs, repeat only changed steps.

Only the Python standard library is used here: the set-up runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Missing(Exception):
    """Something that the user has to install; the message ends with the command that does it."""


def run(*command: object, env: dict[str, str] | None = None) -> str:
    """Run a command in the repository; return its output, or stop with the end of it."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"`{' '.join(words)}` ended with status {done.returncode}:\n{done.stdout[-6000:]}"
        )
    return done.stdout


class Environment(NamedTuple):
    """The virtual environment that is set up."""

    folder: Path
    # True: with TensorFlow's GPU wheel, and NCCL in Horovod
    gpu: bool = False

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamps(self) -> Path:
        """The folder with one stamp file for each completed step."""
        return self.folder / "tfcommx-stamps"

    def pip(self, *arguments: object, env: dict[str, str] | None = None) -> str:
        """Run pip in the environment."""
        return run(self.python, "-m", "pip", "--disable-pip-version-check", *arguments, env=env)

    def has(self, pattern: str) -> bool:
        """Return True if a file that matches the pattern is among the installed packages."""
        return any(self.folder.glob(f"lib/python*/site-packages/{pattern}"))

    def step(
        self,
        name: str,
        what: str,
        key: str,
        work: Callable[[], str | None],
        still_there: Callable[[], bool],
    ) -> None:
        """Carry out a step of the set-up, unless its result is up to date; print its duration.

        Args:
            name: of the step and of its stamp.
            what: description of the step, printed for the user.
            key: hash of the step's inputs; the step is repeated if it has changed.
            work: carries out the step; returns a remark or None.
            still_there: returns True if the step's result exists.

        **Raises:** Missing in another user's clone, before the minutes of building.
        """
        stamp = self.stamps / name
        if stamp.is_file() and stamp.read_text() == key and still_there():
            return
        if not os.access(ROOT, os.W_OK):
            raise Missing(
                "A clone that this user can write to is required, because the native library is "
                f"built in it. Received {ROOT}. Clone the repository into your home"
            )
        print(f"[set-up] {what} ...", flush=True)
        start = time.monotonic()
        # Interrupted work has half of these inputs, though later ones may be the former ones again
        stamp.unlink(missing_ok=True)
        remark = work()
        self.stamps.mkdir(parents=True, exist_ok=True)
        stamp.write_text(key)
        seconds = f"{time.monotonic() - start:.0f} s"
        print(f"[set-up]   {name}: {seconds}{f' ({remark})' if remark else ''}", flush=True)


def digest(*parts: object) -> str:
    """Hash strings, and files by content; a folder counts with every file below it."""
    total = hashlib.sha256()
    for part in parts:
        if not isinstance(part, Path):
            total.update(repr(part).encode() + b"\0")
            continue
        below = sorted(path for path in part.rglob("*") if path.is_file())
        for path in below if part.is_dir() else [part]:
            name = str(path.relative_to(ROOT)).encode()
            total.update(name + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
