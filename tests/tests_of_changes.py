"""Print the tests of the packages that were changed, for `make check`.

    python tests/tests_of_changes.py          # since main, with uncommitted changes

A file of tfcommx/PACKAGE/ stands for tests/PACKAGE/; a test for itself; a page for tests/docs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent


def changed_files() -> list[str]:
    """Return the files, tracked or new, that differ from the commit where this branch left main."""
    base = git("merge-base", "HEAD", "main")[:1] or ["HEAD"]
    return git("diff", "--name-only", *base) + git("ls-files", "--others", "--exclude-standard")


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split()


def tests_of(path: str) -> str | None:
    """Return the file or folder with the tests of a changed file; None if it has none.

    >>> tests_of("tfcommx/routes/hitopk.py"), tests_of("README.md"), tests_of("LICENSE")
    ('tests/routes', 'tests/docs', None)
    """
    parts = PurePosixPath(path).parts
    if parts[0] == "tests" and parts[-1].startswith("test_"):
        return path
    if path.endswith(".md"):
        return "tests/docs"
    rooms = {"ops": "kernels", "configs": "recipes", "docs": "docs"}
    if parts[0] == "scripts":
        room = {"documents": "docs", "setup": "bugs"}.get(parts[1], f"scripts/{parts[1]}")
        return f"tests/{room}" if (ROOT / "tests" / room).is_dir() else "tests/scripts"
    room = parts[1:2] if parts[0] == "tfcommx" else [rooms.get(parts[0], "")]
    folder = f"tests/{room[0]}" if room and room[0] else ""
    return folder if folder and (ROOT / folder).is_dir() else None


if __name__ == "__main__":
    found = {one for one in map(tests_of, changed_files()) if one and (ROOT / one).exists()}
    print(*sorted({"tests/test_layers.py", *found}))
