"""Fashion-MNIST in a recipe, from its original files.

The files are IDX: arrays of unsigned bytes after a short header, gzipped. They are taken from the
first of these: the cache folder, Debian's package if it is installed, that package by `apt-get
download` (which needs no root), the download of TensorFlow Datasets.

**Source:** H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking
machine learning algorithms", 2017. 60,000 training and 10,000 test images of 10 kinds of clothing;
MIT licence.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from tfcommx.core import DataError, local_path
from tfcommx.data.sources.arrays import Arrays
from tfcommx.recipes.datasets import debian
from tfcommx.recipes.datasets.picture_dataset import PictureDataset
from tfcommx.recipes.families import Data, DataRank

if TYPE_CHECKING:
    import tensorflow as tf

# Command that fetches the files of the only data set in this format
FETCH = "python -m tfcommx.recipes.datasets fashion_mnist"


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read one gzipped IDX file of unsigned bytes, uint8 of `shape`.

    The file holds 2 zero bytes, the type 8, the number of dimensions, the sizes (big-endian) and
    the entries.

    **Raises:** DataError with the file, the requirement and the received value.
    """
    header = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)
    length = len(header) + math.prod(shape)
    try:
        with gzip.open(path) as file:
            # One extra byte shows that the file is too long. The read is limited because some bytes
            # can decompress to gigabytes
            content = file.read(length + 1)
    except FileNotFoundError:
        raise DataError(f"{path} is missing. Run `{FETCH}` to fetch it.") from None
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(damaged(path, "a whole gzip file", str(error))) from error
    if len(content) != length or not content.startswith(header):
        required = f"{length:,} bytes that begin with {header.hex(' ')} (sizes {shape})"
        start = content[: len(header)].hex(" ")
        raise DataError(damaged(path, required, f"{len(content):,} that begin with {start!r}"))
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def damaged(path: Path, required: str, received: str) -> str:
    """Return the error message about a damaged file."""
    return (
        f"{path} is damaged: {required} required, received {received}. Delete it and run `{FETCH}`."
    )


FILES = (
    *("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    *("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
)
CLASSES = (
    *("T-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
TRAIN_IMAGES, TEST_IMAGES, SIDE = 60_000, 10_000, 28
DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


# --- find or get the files --------------------------------------------------------------


def fetch(folder: Path | None = None) -> Path:
    """Return a folder that holds the four files; download them first if no folder does.

    Several processes may call at once.

    Args:
        folder: folder to keep the files in; None: Debian's, or `~/.cache/tfcommx/fashion-mnist`.

    **Raises:** DataError with the failed attempts and the command that installs the package;
    ConfigurationError for a user without a home.
    """
    target = folder or local_path("data.folder", "~/.cache/tfcommx/fashion-mnist")
    # Debian's in place of a mistyped folder would train on other files than those of the user
    for candidate in (target,) if folder else (target, DEBIAN_FOLDER):
        if all((candidate / name).is_file() for name in FILES):
            return candidate
    tried = []
    for source, get in (
        ("Debian's package", _from_debian),
        ("TensorFlow Datasets", _from_tensorflow_datasets),
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Next to the target, because a file cannot be renamed onto another file system
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
            try:
                _put_in_place(get(Path(work)), target)
                return target
            except (DataError, OSError, subprocess.SubprocessError) as failure:
                tried.append(f"{source}: {failure}")
    raise DataError(
        f"Fashion-MNIST is required in {target}, and could not be fetched.\n  "
        + "\n  ".join(tried)
        + f"\nInstall it (`apt-get install {DEBIAN_PACKAGE}`) and leave `folder` out, or put these "
        f"files into {target}: {', '.join(FILES)}."
    )


def _put_in_place(source: Path, target: Path) -> None:
    """Check the files in `source`, on the same file system, and rename each into `target`."""
    if missing := [name for name in FILES if not (source / name).is_file()]:
        raise DataError(f"{', '.join(missing)} missing in the download")
    # Read once before, because the next run would take a damaged file from the target
    load(source)
    target.mkdir(exist_ok=True)
    # Renamed when complete, because others may read meanwhile, and a download may be killed
    for name in FILES:
        os.replace(source / name, target / name)


def _from_debian(work: Path) -> Path:
    return debian.unpack([DEBIAN_PACKAGE], work) / DEBIAN_FOLDER.relative_to("/")


def _from_tensorflow_datasets(work: Path) -> Path:
    code = (
        "import shutil, sys, tensorflow_datasets as tfds\n"
        "manager = tfds.download.DownloadManager(download_dir=sys.argv[1])\n"
        "url = tfds.builder_cls('fashion_mnist').URL\n"
        "for name in sys.argv[3:]: shutil.copyfile(manager.download(url + name), "
        "f'{sys.argv[2]}/{name}')\n"
    )
    (work / "named").mkdir()
    # In a separate process, because it imports TensorFlow and must be ended if the network does not
    # answer
    debian.run(
        [sys.executable, "-c", code, str(work / "downloads"), str(work / "named"), *FILES], work
    )
    return work / "named"


# --- read them --------------------------------------------------------------------------


def load(
    folder: Path, train_images: int = TRAIN_IMAGES, test_images: int = TEST_IMAGES
) -> tuple[np.ndarray, ...]:
    """Read the four files.

    Args:
        train_images, test_images: required numbers of images; other values are for tests.

    Returns:
        Train images uint8 [60000, 28, 28, 1], train labels uint8 [60000] in [0, 9], test images
        uint8 [10000, 28, 28, 1], test labels uint8 [10000].

    **Raises:** DataError with the name of a file that is missing, truncated or of another kind.
    """
    arrays: list[np.ndarray] = []
    for names, count in ((FILES[:2], train_images), (FILES[2:], test_images)):
        images, labels = (Path(folder) / name for name in names)
        arrays.append(read_idx(images, (count, SIDE, SIDE))[..., np.newaxis])
        arrays.append(read_idx(labels, (count,)))
        if (most := arrays[-1].max(initial=0)) >= len(CLASSES):
            raise DataError(damaged(labels, f"labels in [0, {len(CLASSES) - 1}]", f"{most}"))
    return tuple(arrays)


class FashionMnist(PictureDataset):
    """60,000 + 10,000 pictures of clothes, 28 x 28 pixels in grey, and their augmentation.

    They are enlarged for resolutions above 28.
    """

    channels = 1

    name: Literal["fashion_mnist"] = "fashion_mnist"
    # Folder of the four files; None: the cache folder or Debian's, filled by a download if needed
    folder: Path | None = None
    # Number of training pictures, from the first; None: all 60,000
    limit: int | None = Field(None, ge=1)
    # Number of test pictures, from the first; None: all 10,000
    test_limit: int | None = Field(None, ge=1)
    # Largest random shift of a batch, in pixels of the full picture; 0: no shift
    shift: int = Field(1, ge=0, le=8)

    def fetch(self) -> Path:
        return fetch(self.folder)

    def build(self, place: DataRank) -> Data:
        from tfcommx.recipes.datasets.pictures import Pictures

        train_x, train_y, test_x, test_y = load(self.fetch())
        used, tested = slice(self.limit), slice(self.test_limit)
        return Pictures(
            self,
            Arrays(train_x[used], train_y[used], CLASSES, self.name),
            Arrays(test_x[tested], test_y[tested], CLASSES, f"{self.name} test"),
            place,
            self._shifted if self.shift else None,
        )

    def _shifted(self, pictures: tf.Tensor, seed: tf.Tensor, resolution: int) -> tf.Tensor:
        from tfcommx.recipes.datasets.pictures import shifted

        return shifted(pictures, seed, round(self.shift * resolution / SIDE))
