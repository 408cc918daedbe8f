"""Arrays and TFRecord files in forms that users have, and that no batch can have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.core import ConfigurationError, DataError, Topology
from tfcommx.data.options import BatchSpec
from tfcommx.data.sources import Arrays, ImageFeatures, TFRecords, find_source
from tfcommx.recipes.datasets.picture_files import open_arrays
from tfcommx.recipes.families import DataRank

PICTURES, LABELS = np.zeros((4, 32, 32, 3), np.uint8), np.arange(4)


@pytest.mark.parametrize(
    ("images", "labels", "classes", "words"),
    [
        (PICTURES, LABELS - 1, (), r"-1 to 2"),
        (PICTURES, LABELS, ("a", "b"), r"\[0, 2\).* 0 to 3"),
        (PICTURES, LABELS, "abcd", "'abcd'"),
        (PICTURES[:, :0], LABELS, (), r"\[4, 0, 32, 3\]"),
        (PICTURES[:, :, :0], LABELS, (), r"\[4, 32, 0, 3\]"),
        (PICTURES, LABELS[:, None], (), r"labels\[:, 0\]"),
        (PICTURES, np.eye(4), (), "argmax"),
        (PICTURES / 255, LABELS, (), r"uint8.*255 \*"),
        (PICTURES.transpose(0, 3, 1, 2), LABELS, (), "transpose"),
        (PICTURES, np.ma.masked_equal(LABELS, 1), (), "masked"),
        (np.ma.masked_less(PICTURES, 99), LABELS, (), "masked"),
        ([PICTURES[0], PICTURES[0, :9]], LABELS[:2], (), "Resize"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_of_another_form_are_refused_with_a_remedy(
    images: Any, labels: Any, classes: Any, words: str
) -> None:
    """Negative labels were served, and pictures of different sizes were NumPy's ValueError."""
    with pytest.raises(DataError, match=words):
        Arrays(images, labels, classes)


def test_arrays_without_samples_may_have_any_size() -> None:
    assert Arrays(PICTURES[:0, :0], LABELS[:0]).count == 0


def test_a_deviation_of_values_to_255_is_refused() -> None:
    """Its mean was refused, but the deviation alone made all pictures almost black."""
    with pytest.raises(ConfigurationError, match=r"`std`.*58\.4.*\b255\b"):
        BatchSpec(2, std=(58.4, 57.1, 57.4))


@pytest.mark.parametrize("values", [{"mean": (0.5,)}, {"std": (0.25,)}])
def test_a_normalization_of_whole_numbers_is_refused(values: dict[str, tuple[float]]) -> None:
    """It was left out without a word."""
    with pytest.raises(ConfigurationError, match="uint8"):
        BatchSpec(2, dtype="uint8", **values)


def test_a_label_that_cannot_be_a_class_is_refused(tmp_path: Path) -> None:
    """A network was made with an output for each number up to the largest label."""
    train = PICTURES, np.array([0, 1, 2, 10**12])
    with pytest.raises(DataError, match="1,000,000,000,000"):
        open_arrays(train, train, DataRank(Topology(1, 1), 0), memory=tmp_path)


@pytest.mark.parametrize(
    ("labels", "absent"), [([0, 1, 2, 255], "252 .*3"), ([1, 2, 3, 4], "1 .*0")]
)
def test_classes_without_pictures_are_announced(
    tmp_path: Path, labels: list[int], absent: str
) -> None:
    train = PICTURES, np.array(labels)
    with pytest.warns(UserWarning, match=rf"\b{absent}\b"):
        open_arrays(train, train, DataRank(Topology(1, 1), 0), memory=tmp_path).close()


def test_labels_that_count_from_1_are_named() -> None:
    """The error said that it had received labels from 0 to 4."""
    with pytest.raises(DataError, match=r"from 1 to 4.* - 1\."):
        Arrays(PICTURES, np.array([1, 2, 3, 4]), classes=("a", "b", "c", "d"))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ImageFeatures(first_label="0"), "first_label"),
        (lambda: ImageFeatures(channels=5), "channels"),
        (lambda: TFRecords("a", {"image": "image"}), "ImageFeatures"),
    ],
)
def test_features_of_another_form_are_refused(make: Callable[[], object], named: str) -> None:
    """They ended with an AttributeError, or with a TypeError in the first batch."""
    with pytest.raises(ConfigurationError, match=named):
        make()


def write(path: Path, compression: str | None = None, level: int | None = None) -> Path:
    options = tf.io.TFRecordOptions(compression, compression_level=level)
    with tf.io.TFRecordWriter(str(path), options) as writer:
        writer.write(b"record")
    return path


def test_shards_may_have_an_ending(tmp_path: Path) -> None:
    """They were found and not counted: `Received 0 files without any`."""
    for shard in range(2):
        write(tmp_path / f"train-{shard:05}-of-00002.tfrecord")
    assert find_source(tmp_path).count == 2


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (lambda root: root / "*.tfrecord", "glob"),
        (lambda root: root, "glob"),
        (lambda root: write(root / "a", "GZIP"), "GZIP"),
        (lambda root: write(root / "a", "ZLIB"), "ZLIB"),
        (lambda root: write(root / "a", "ZLIB", 9), "ZLIB"),
    ],
    ids=["pattern", "folder", "gzip", "zlib", "best zlib"],
)
def test_other_files_of_records_are_named(
    tmp_path: Path, files: Callable[[Path], Path], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        TFRecords(files(tmp_path))
