"""Finds the source that a user names: a path, or a TensorFlow data set."""

from __future__ import annotations

import os

from tfcommx.data.sources.base import Source
from tfcommx.data.sources.folder import Folder, check_folder
from tfcommx.data.sources.tfrecord import imagenet, tfds
from tfcommx.terms import local_path


def find_source(text: str | os.PathLike, split: str = "train") -> Source:
    """Return the samples that a path or a name stands for.

    Args:
        text: a folder of class folders, a folder of ImageNet's shards, or the name of a TensorFlow
            data set, such as `imagenette/160px-v2`. What begins with `/`, `.` or `~` is a path.
        split: of shards and of TensorFlow data sets.

    **Raises:** PlanError if there is no such folder or data set, or nothing in it that can be read,
    and for an address such as gs://bucket/folder.
    """
    path = local_path("source", text)
    if isinstance(text, os.PathLike) or text.startswith((os.sep, ".", "~")):
        check_folder(path)
    elif not path.is_dir():  # Names of data sets have a slash too, before the configuration
        return tfds(text, split)
    shards = next(path.glob(f"{split}-*-of-*"), None)
    return imagenet(path, split) if shards is not None else Folder(path)
