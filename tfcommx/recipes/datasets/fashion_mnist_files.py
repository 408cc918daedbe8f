"""The files of Fashion-MNIST: finds or downloads the original IDX files, and reads them.

They come from the cache folder, else from Debian's package if it is installed, else from that
package by `apt-get download` (which needs no root), else from TensorFlow Datasets' download.

**Source:** H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking
machine learning algorithms", 2017. 60,000 training and 10,000 test images of 10 kinds of clothing;
MIT licence.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tfcommx.recipes.base import DataError
from tfcommx.recipes.datasets import debian
from tfcommx.recipes.datasets.idx import damaged, read_idx

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
CLASSES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
TRAIN_IMAGES, TEST_IMAGES, SIDE = 60_000, 10_000, 28
DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


# --- find or get the files --------------------------------------------------------------


def fetch(folder: Path | None = None) -> Path:
    """Return a folder that holds the four files; download them first if no folder does.

    Files appear by a rename: a killed download leaves no half file, and several processes may call
    at once.

    Args:
        folder: where to keep the files; None: `~/.cache/tfcommx/fashion-mnist`.

    **Raises:** DataError that lists what was tried and the command that installs the package.
    """
    target = Path(folder or Path.home() / ".cache" / "tfcommx" / "fashion-mnist")
    for there in (target, DEBIAN_FOLDER):
        if _complete(there):
            return there
    tried = []
    for source, get in (
        ("Debian's package", _from_debian),
        ("TensorFlow Datasets", _from_tensorflow_datasets),
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
            try:
                _put_in_place(get(Path(work)), target)
                return target
            except (DataError, OSError, subprocess.SubprocessError) as failure:
                tried.append(f"{source}: {failure}")
    raise DataError(
        f"Fashion-MNIST is required in {target} or {DEBIAN_FOLDER}, and could not be fetched.\n  "
        + "\n  ".join(tried)
        + f"\nInstall it (`apt-get install {DEBIAN_PACKAGE}`), or put these files into {target}: "
        f"{', '.join(FILES)}."
    )


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _put_in_place(found: Path, target: Path) -> None:
    """Check the files in `found`, on the same file system, and rename each into `target`."""
    if missing := [name for name in FILES if not (found / name).is_file()]:
        raise DataError(f"{', '.join(missing)} missing in what was downloaded")
    load(found)
    target.mkdir(exist_ok=True)
    for name in FILES:
        os.replace(found / name, target / name)


def _from_debian(work: Path) -> Path:
    return debian.unpack([DEBIAN_PACKAGE], work) / DEBIAN_FOLDER.relative_to("/")


def _from_tensorflow_datasets(work: Path) -> Path:
    """Let TensorFlow Datasets download its copy; keep the IDX files."""
    code = (
        "import shutil, sys, tensorflow_datasets as tfds\n"
        "manager = tfds.download.DownloadManager(download_dir=sys.argv[1])\n"
        "url = tfds.builder_cls('fashion_mnist').URL\n"
        "for name in sys.argv[3:]: shutil.copyfile(manager.download(url + name), "
        "f'{sys.argv[2]}/{name}')\n"
    )
    (work / "named").mkdir()
    # In a process of its own: it imports TensorFlow, and can be ended if the network does not
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
        folder: holds the four files.
        train_images, test_images: how many there must be; other numbers are for tests.

    Returns:
        Train images uint8 [60000, 28, 28, 1], train labels uint8 [60000] in [0, 9], test images
        uint8 [10000, 28, 28, 1], test labels uint8 [10000].

    **Raises:** DataError that names a file which is missing, truncated or of another kind.
    """
    arrays: list[np.ndarray] = []
    for images, labels, count in (
        (FILES[0], FILES[1], train_images),
        (FILES[2], FILES[3], test_images),
    ):
        arrays.append(read_idx(Path(folder) / images, (count, SIDE, SIDE))[..., np.newaxis])
        arrays.append(read_idx(Path(folder) / labels, (count,)))
        if arrays[-1].max(initial=0) >= len(CLASSES):
            raise DataError(
                damaged(
                    Path(folder) / labels,
                    f"labels in [0, {len(CLASSES) - 1}]",
                    f"{arrays[-1].max()}",
                )
            )
    return tuple(arrays)
