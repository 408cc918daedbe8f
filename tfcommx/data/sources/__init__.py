"""Sources of samples, one a file.

To add one: write a class with the members of `source.Source` in a separate file, and name it here.
`find_source` makes a source from a path or a name.
"""

import os

from tfcommx.core import local_path
from tfcommx.data.sources.arrays import Arrays
from tfcommx.data.sources.folder import Folder, check_folder
from tfcommx.data.sources.source import SampleError, Source
from tfcommx.data.sources.tfrecord import ImageFeatures, TFRecords, imagenet, tfds

__all__ = [
    "Arrays",
    "Folder",
    "ImageFeatures",
    "SampleError",
    "Source",
    "TFRecords",
    "find_source",
    "imagenet",
    "tfds",
]


def find_source(text: str | os.PathLike[str], split: str = "train") -> Source:
    """Return the source for a path or a name.

    Args:
        text: a folder of class folders, a folder of ImageNet's shards, or the name of a TensorFlow
            data set, such as `imagenette/160px-v2`. A text that begins with `/`, `.` or `~` is a
            path.

    **Raises:** DataError if there is no such folder or data set, or no readable sample in it;
    ConfigurationError for an address such as gs://bucket/folder.
    """
    path = local_path("source", text)
    if isinstance(text, os.PathLike) or text.startswith((os.sep, ".", "~")):
        check_folder(path)
    elif not path.is_dir():  # A name of a data set may have a slash too
        return tfds(text, split)
    shards = next(path.glob(f"{split}-*-of-*"), None)
    return imagenet(path, split) if shards is not None else Folder(path)
