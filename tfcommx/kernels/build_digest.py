"""Which sources the native library was built from.

Standard library only: set-up and setup.py run this file before anything is installed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = {".cc", ".cu", ".h", ".inl"}


def digest(folder: Path) -> str:
    """Hash the names and contents of the native sources below a folder.

    **Cost:** reads some 200 kB.
    """
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        content = path.read_bytes()
        total.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()[:16]
