"""Samples from a folder of class folders with images."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from tfcommx.core import ConfigurationError, DataError, check_name, local_path, told_apart
from tfcommx.data.sources.source import key_of

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
# Folders and files, in lower case, that operating systems add: thumbnails, deleted files, resource
# forks of files that were copied from a Mac. Names that begin with a dot are hidden anyway
JUNK_FOLDERS = {
    *("__macosx", "__pycache__", "@eadir", "@recycle", "@tmp", "#recycle", "#snapshot"),
    *("$recycle.bin", "found.000", "lost+found", "recycler", "system volume information"),
}
JUNK_FILES = {"desktop.ini", "ehthumbs.db", "thumbs.db"}
# Names of folders that hold a part of a data set, in lower case
SPLITS = {"dev", "eval", "test", "testing", "train", "training", "val", "valid", "validation"}


def check_folder(path: Path) -> None:
    """Refuse a path that is not a folder."""
    if not path.is_dir():
        raise DataError(
            f"{path.absolute()} is no folder, or does not exist. Check the path and its mount."
        )


def _refuse(error: OSError) -> NoReturn:
    link = (
        f"; it is a link to {os.readlink(error.filename)}" if os.path.islink(error.filename) else ""
    )
    raise DataError(
        f"Images and folders that can be read are required. {error.filename}: "
        f"{error.strerror}{link}. Fix or remove it."
    ) from error


def _facts(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        _refuse(error)


def _is_junk(name: str, junk: set[str]) -> bool:
    return name.startswith(".") or name.lower() in junk


def _images(
    top: Path, passed_over: Counter[str], visited: set[tuple[int, int]]
) -> list[tuple[str, os.stat_result]]:
    """Return the paths and file attributes of the images below a folder, in alphabetical order.

    Args:
        visited: receives (device, inode) of each folder.
    """
    images = []
    for folder, below, files in os.walk(top, onerror=_refuse, followlinks=True):
        facts = _facts(folder)
        # Reached again by a link: a cycle, or the same images
        if (facts.st_dev, facts.st_ino) in visited:
            below.clear()
            continue
        visited.add((facts.st_dev, facts.st_ino))
        # Sorted, because file systems list names in any order, and all nodes must number samples
        # alike
        below[:] = sorted(name for name in below if not _is_junk(name, JUNK_FOLDERS))
        for file in sorted(files):
            if _is_junk(file, JUNK_FILES):
                continue
            path = os.path.join(folder, file)
            is_image = file.lower().endswith(ENDINGS)
            # Links with any ending, because a broken one may have been a folder
            if is_image or os.path.islink(path):
                facts = _facts(path)
                # Regular files only, because reading a pipe would wait forever
                if not stat.S_ISREG(facts.st_mode):
                    continue
                if is_image:
                    images.append((path, facts))
                    continue
            passed_over[Path(file).suffix.lower() or "no ending"] += 1
    return images


def _listed(passed_over: Counter[str]) -> str:
    """Return the numbers of files by their ending."""
    return ", ".join(f"{number:,} {ending}" for ending, number in sorted(passed_over.items()))


def _shared_file(files: Sequence[tuple[str, int]], facts: array[int]) -> str:
    """Return a sentence on a file that is in two classes, by any link; "" without one.

    Args:
        files: path and label of each file.
        facts: device, inode and bytes of each file, one after the other.
    """
    rows = np.array(facts, np.uint64).reshape(-1, 3)
    labels = np.array([label for _, label in files])
    # By file, then by label, so that all names of one file are neighbours
    order = np.lexsort((labels, *rows.T))
    rows, labels = rows[order], labels[order]
    # Some file systems number no inodes
    same = (rows[1:] == rows[:-1]).all(1) & (labels[1:] != labels[:-1]) & (rows[1:, 1] > 0)
    if not same.any():
        return ""
    first = int(np.flatnonzero(same)[0])
    one, other = (files[order[position]][0] for position in (first, first + 1))
    return (
        f"{one} and {other} are one file by a link, and so are {int(same.sum()):,} pairs in all: "
        "it has the labels of both classes. Remove one of them."
    )


def _first_out_of_order(classes: Sequence[str]) -> int | None:
    """Return the label of the first name that is out of the order of numbers, or None.

    >>> _first_out_of_order(["1", "10", "2"]), _first_out_of_order(["01", "02", "10"])
    (1, None)
    """
    if not all(map(str.isdecimal, classes)):
        return None
    pairs = zip(classes, sorted(classes, key=int), strict=True)
    return next((label for label, (name, wanted) in enumerate(pairs) if name != wanted), None)


def _warn_of_classes(source: Folder, shared: str, named: bool) -> None:
    """Warn if the class folders are most likely a mistake.

    Args:
        shared: sentence on a folder or file in two classes; "" without one.
        named: True if the user gave the order of the classes.
    """
    path, classes, problems = source.path, source.classes, [shared] if shared else []
    if look_alike := told_apart(classes):
        problems.append(f"{look_alike.strip()} They are separate classes.")
    if not named and (label := _first_out_of_order(classes)) is not None:
        problems.append(
            f"Class folders with numbers as names are in the order of text: {classes[label]!r} has "
            f"the label {label}. Write all numbers with as many digits, or give `classes`."
        )
    if not named and len(classes) > 1 and {name.lower() for name in classes} <= SPLITS:
        problems.append(
            f"The class folders {listed_names(classes)} have names of parts of a data set. Give "
            f"the folder of one part: {path / classes[0]}."
        )
    if not named and len(classes) == 1:
        problems.append(
            f"All images have the label 0, because there is only one class folder, {classes[0]!r}. "
            "Sort the images into a folder for each class, or, if these are in it, give "
            f"{path / classes[0]}."
        )
    for problem in problems:
        warnings.warn(f"{path}: {problem}", stacklevel=3)


def _warn(source: Folder, passed_over: Counter[str]) -> None:
    warnings.warn(
        f"{passed_over.total():,} files in {source.path} are passed over, because only "
        f"{', '.join(ENDINGS)} in class folders are read: {_listed(passed_over)}. "
        f"{source.count:,} images in {len(source.classes)} classes are left: "
        f"{listed_names(source.classes)}. Convert or move these files if they are samples.",
        stacklevel=3,
    )


def listed_names(names: Sequence[str], most: int = 10) -> str:
    """Return the first names, and the number of the others.

    >>> listed_names(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    tail = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + tail


def _checked_names(classes: Sequence[str]) -> tuple[str, ...]:
    names = () if isinstance(classes, str) else tuple(classes)
    # Names alone, because a path could lead out of the folder
    if len(set(names)) < len(names) or not names or any(Path(x).name != x or not x for x in names):
        raise DataError(
            "`classes` must be different names of folders, such as ('cat', 'dog'). Received "
            f"{classes!r}."
        )
    return names


def _digest_of_ends(path: str) -> str:
    """Return a digest of the first and last 64 KiB of a file; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            start, size = file.read(1 << 16), os.fstat(file.fileno()).st_size
            file.seek(max(len(start), size - (1 << 16)))
            return hashlib.sha256(start + file.read(1 << 16)).hexdigest()
    except OSError:  # Left to `read`, whose caller knows whether to skip the file
        return ""


class Folder:
    """One folder per class, images anywhere below it.

    Labels number the class folders in alphabetical order. An empty class folder is a class without
    samples. Links are followed. Only regular files are read; hidden files and folders, and those of
    operating systems (`__MACOSX`, `@eaDir`, `lost+found`, `Thumbs.db`), are skipped. Files with
    other endings, and images next to the class folders, are ignored with one warning, which has
    their number by ending. A warning also names class folders whose names look alike, are numbers
    in another order than that of their labels, or those of a data set's parts, a single class
    folder, and links by which a folder or file is in two classes. A replaced file leads to new
    caches, because the key is made of the files' relative paths, sizes, and times of content and
    inode. A copy has other times of the inode, and separate caches; the same files on another mount
    or host share theirs.

    Args:
        path: the folder that holds the class folders.
        classes: names of the class folders to use, in the order of their labels; by default all.

    **Cost:** one walk over the folder with one stat per file; the ends of 64 files are read.
    **Raises:** DataError for `classes` that are no names, or if there is no class folder or no
    image, a folder cannot be listed, or a link is broken.
    """

    channels = 3
    shape: tuple[int, int] | None = None

    def __init__(
        self, path: str | os.PathLike[str], classes: tuple[str, ...] | None = None
    ) -> None:
        self.path = local_path("path", path)
        self.name = str(self.path)
        check_folder(self.path)
        try:
            names = sorted(os.listdir(self.path))
        except OSError as error:
            _refuse(error)
        names = [name for name in names if not _is_junk(name, JUNK_FOLDERS)]
        folders = tuple(
            name for name in names if stat.S_ISDIR(_facts(os.path.join(self.path, name)).st_mode)
        )
        passed_over = Counter(
            f"{Path(name).suffix.lower()} beside the class folders"
            for name in names
            if name not in folders and name.lower().endswith(ENDINGS)
        )
        self.classes = folders if classes is None else _checked_names(classes)
        for kind in self.classes:
            if not os.path.lexists(self.path / kind):
                try:
                    check_name("class folder", kind, folders, f"in {self.path}")
                except ConfigurationError as error:
                    raise DataError(str(error)) from error
        self._files: list[tuple[str, int]] = []
        self.contents: dict[str, str] = {}
        facts: list[object] = ["folder", *self.classes]
        # (device, inode) of a folder -> its class; a sentence on classes that share one
        folder_class: dict[tuple[int, int], str] = {}
        shared = ""
        inodes = array("Q")
        for label, kind in enumerate(self.classes):
            visited: set[tuple[int, int]] = set()
            images = _images(self.path / kind, passed_over, visited)
            others = {folder_class.setdefault(place, kind) for place in visited} - {kind}
            if others and not shared:
                shared = (
                    f"The classes {min(others)!r} and {kind!r} share a folder, by a link: its "
                    "images have both labels. Remove the link."
                )
            # Without the times of change, because a copy has others
            sizes: list[object] = []
            for file, status in images:
                self._files.append((file, label))
                inodes.extend((status.st_dev, status.st_ino, status.st_size))
                name = os.path.relpath(file, self.path)
                # The time of the inode, too, because copies may keep the other one (`cp -p`, rsync)
                facts += (name, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                sizes += (name, status.st_size)
            self.contents[f"class {kind!r}"] = f"{len(images)} files ({key_of(sizes)[:8]})"
        self.count = len(self._files)
        if not self.count:
            raise DataError(
                f"Images ({', '.join(ENDINGS)}) in class folders are required. {self.path} has "
                f"{len(folders)} folders and no such image in them"
                + f", but {_listed(passed_over)}" * bool(passed_over)
                + ". Give the folder that holds the class folders."
                + " Read TFRecord files as TFRecords(files)."
                * any(".tfrecord" in name.lower() for name in names)
            )
        if passed_over:
            _warn(self, passed_over)
        _warn_of_classes(self, shared or _shared_file(self._files, inodes), classes is not None)
        # The contents of 64 files tell folders apart whose times are equal: files of one tick of
        # the clock, and those of images of file systems that keep no times of the inode
        sampled = self._files[:: max(1, self.count // 64)][:64]
        self.key = key_of((*facts, *(_digest_of_ends(path) for path, _ in sampled)))

    def check_outside(self, option: str, folder: str) -> None:
        """Refuse a folder of the cache that would be a class of the next run.

        **Raises:** ConfigurationError.
        """
        inside = os.path.relpath(os.path.realpath(folder), os.path.realpath(self.path))
        parts = Path(inside).parts
        if parts[:1] != ("..",) and not any(_is_junk(part, JUNK_FOLDERS) for part in parts):
            raise ConfigurationError(
                f"`{option}` must be outside of the folder of the samples, because its files would "
                f"be a class of the next run. Received {folder!r} in {self.name}. Give a folder "
                "on a local disk."
            )

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
