"""Samples from a folder of class folders with images."""

from __future__ import annotations

import os
from pathlib import Path

from tfcommx.data.source import key_of
from tfcommx.terms import PlanError

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")


class Folder:
    """One folder per class, images anywhere below it; the labels are the class folders' ranks in alphabetical order.

    An empty class folder is a class without samples. Hidden files and other endings are left out. The key is made of the files'
    relative paths, sizes and times of change: a file that is replaced makes new caches.
    **Cost:** one walk over the folder with one stat per file.
    **Raises:** PlanError where there is no class folder or no image.
    """

    channels = 3
    shape = None

    def __init__(self, path: str | os.PathLike, classes: tuple[str, ...] | None = None) -> None:
        self.path = Path(path)
        self.name = str(self.path)
        if not self.path.is_dir():
            raise PlanError(
                f"A folder of class folders is required. {self.path} is not a folder. Check the path and its mount."
            )
        found = tuple(
            sorted(entry.name for entry in os.scandir(self.path) if entry.is_dir() and not entry.name.startswith("."))
        )
        self.classes = tuple(classes) if classes is not None else found
        self._files: list[tuple[str, int]] = []
        facts: list[object] = ["folder", *self.classes]
        for label, kind in enumerate(self.classes):
            for folder, below, files in os.walk(self.path / kind):
                below.sort()
                for file in sorted(files):
                    if file.lower().endswith(ENDINGS) and not file.startswith("."):
                        full = os.path.join(folder, file)
                        stat = os.stat(full)
                        self._files.append((full, label))
                        facts += (os.path.relpath(full, self.path), stat.st_size, stat.st_mtime_ns)
        self.count = len(self._files)
        if not self.count:
            raise PlanError(
                f"Images ({', '.join(ENDINGS)}) in class folders are required. {self.path} has {len(found)} folders and no "
                "such image in them. Give the folder that holds the class folders."
            )
        self.key = key_of(facts)

    def read(self, sample: int) -> tuple[bytes, int]:
        path, label = self._files[sample]
        with open(path, "rb") as file:
            return file.read(), label

    def where(self, sample: int) -> str:
        return self._files[sample][0]

    def label(self, sample: int) -> int:
        return self._files[sample][1]
