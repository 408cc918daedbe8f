"""Samples from a folder of class folders with images."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tfcommx.data.sources.base import key_of
from tfcommx.terms import PlanError

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")


def check_folder(path: Path) -> None:
    """Refuse a path that is no folder."""
    if not path.is_dir():
        what = f"{path} is no folder" if path.exists() else f"The folder {path} does not exist"
        raise PlanError(f"{what}. Check the path and its mount.")


def _refuse(error: OSError) -> None:
    link = (
        f"; it is a link to {os.readlink(error.filename)}" if os.path.islink(error.filename) else ""
    )
    raise PlanError(
        f"Images and folders that can be read are required. {error.filename}: "
        f"{error.strerror}{link}. Fix or remove it."
    ) from error


def _facts(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        _refuse(error)


def _images(top: Path) -> list[tuple[str, os.stat_result]]:
    """Return path and facts of the images below a folder, in alphabetical order.

    Linked folders are followed, each once.
    """
    found, visited = [], set()
    for folder, below, files in os.walk(top, onerror=_refuse, followlinks=True):
        facts = _facts(folder)
        # A link has led here: a circle, or the same images again.
        if (facts.st_dev, facts.st_ino) in visited:
            below.clear()
            continue
        visited.add((facts.st_dev, facts.st_ino))
        below[:] = sorted(name for name in below if not name.startswith("."))
        for file in sorted(files):
            path = os.path.join(folder, file)
            if file.startswith(".") or not (file.lower().endswith(ENDINGS) or os.path.islink(path)):
                continue
            # Of a link also if it has another ending: it may have been a folder, and lead nowhere.
            facts = _facts(path)
            # Reading a pipe would wait forever.
            if stat.S_ISREG(facts.st_mode) and file.lower().endswith(ENDINGS):
                found.append((path, facts))
    return found


class Folder:
    """One folder per class, images anywhere below it.

    Labels number the class folders in alphabetical order. An empty class folder is a class without
    samples. Links are followed. Hidden files and folders, other endings and anything but regular
    files are skipped. The key is made of the files' relative paths, sizes and times of change: a
    file that is replaced makes new caches.

    Args:
        path: of the folder that holds the class folders.
        classes: names of the class folders to take, in the order of their labels; by default all.

    **Cost:** one walk over the folder with one stat per file.
    **Raises:** PlanError if there is no class folder or no image, a folder cannot be listed, or a
    link is broken.
    """

    channels = 3
    shape = None

    def __init__(self, path: str | os.PathLike, classes: tuple[str, ...] | None = None) -> None:
        self.path = Path(path)
        self.name = str(self.path)
        check_folder(self.path)
        try:
            names = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        except OSError as error:
            _refuse(error)
        found = tuple(
            name for name in names if stat.S_ISDIR(_facts(os.path.join(self.path, name)).st_mode)
        )
        self.classes = tuple(classes) if classes is not None else found
        self._files: list[tuple[str, int]] = []
        self.contents: dict[str, str] = {}
        facts: list[object] = ["folder", *self.classes]
        for label, kind in enumerate(self.classes):
            images = _images(self.path / kind)
            # Without the times of change: a copy has others
            sizes: list[object] = []
            for file, known in images:
                self._files.append((file, label))
                name = os.path.relpath(file, self.path)
                facts += (name, known.st_size, known.st_mtime_ns)
                sizes += (name, known.st_size)
            self.contents[f"class {kind!r}"] = f"{len(images)} files ({key_of(sizes)[:8]})"
        self.count = len(self._files)
        if not self.count:
            raise PlanError(
                f"Images ({', '.join(ENDINGS)}) in class folders are required. {self.path} has "
                f"{len(found)} folders and no such image in them. Give the folder that holds the "
                "class folders."
            )
        self.key = key_of(facts)

    def read(self, sample: int) -> tuple[bytes, int]:
        """Return (encoded image, label)."""
        path, label = self._files[sample]
        with open(path, "rb") as file:
            return file.read(), label

    def where(self, sample: int) -> str:
        """Return the path of a sample."""
        return self._files[sample][0]

    def label(self, sample: int) -> int:
        """Return the label of a sample."""
        return self._files[sample][1]
