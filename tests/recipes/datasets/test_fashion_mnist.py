"""The Fashion-MNIST reader refuses damaged files by name, and fetch leaves nothing half done."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from tfcommx.core import ConfigurationError, DataError
from tfcommx.recipes.datasets import fashion_mnist
from tfcommx.recipes.datasets.__main__ import main
from tfcommx.recipes.datasets.fashion_mnist import FILES, fetch, load, read_idx

TRAIN, TEST = 5, 3


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    return (
        bytes([0, 0, kind, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four tiny files of the right form; image i is filled with the value i."""
    (tmp_path / "data").mkdir()
    for (images, labels), count in (((FILES[0], FILES[1]), TRAIN), ((FILES[2], FILES[3]), TEST)):
        pictures = np.broadcast_to(
            np.arange(count, dtype=np.uint8)[:, None, None], (count, 28, 28)
        ).copy()
        (tmp_path / "data" / images).write_bytes(gzip.compress(idx(pictures)))
        (tmp_path / "data" / labels).write_bytes(
            gzip.compress(idx(np.arange(count, dtype=np.uint8)))
        )
    return tmp_path / "data"


def test_reads_what_was_written(folder):
    train_x, train_y, test_x, test_y = load(folder, TRAIN, TEST)
    assert train_x.shape == (TRAIN, 28, 28, 1) and test_x.shape == (TEST, 28, 28, 1)
    assert train_x.dtype == train_y.dtype == np.uint8
    assert train_x[:, 27, 27, 0].tolist() == train_y.tolist() == [0, 1, 2, 3, 4]
    assert test_y.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("damage", "received"),
    [
        (lambda raw, packed: packed[: len(packed) // 2], "end-of-stream"),
        (lambda raw, packed: gzip.compress(raw[:-1]), "3,936 .*3,935 "),
        (lambda raw, packed: gzip.compress(raw + b"\0"), "3,936 .*3,937 "),
        (lambda raw, packed: gzip.compress(raw[:7]), "3,936 .* 7 that"),
        (
            lambda raw, packed: gzip.compress(raw[:2] + b"\x0d" + raw[3:]),
            "00 00 08 03.*00 00 0d 03",
        ),
        (lambda raw, packed: gzip.compress(b""), "00 00 08 03"),
        (
            lambda raw, packed: gzip.compress(idx(np.zeros((6, 28, 28), np.uint8))),
            r"\(5, 28, 28\).*00 00 00 06 ",
        ),
        (lambda raw, packed: b"<html>not found</html>", "b'<h'"),
    ],
)
def test_a_damaged_file_is_named(folder, damage, received):
    path = folder / FILES[0]
    packed = path.read_bytes()
    path.write_bytes(damage(gzip.decompress(packed), packed))
    with pytest.raises(DataError, match=received) as refused:
        load(folder, TRAIN, TEST)
    assert str(path) in str(refused.value)


def test_a_missing_file_and_a_label_out_of_range_are_named(folder):
    (folder / FILES[3]).write_bytes(gzip.compress(idx(np.array([0, 1, 10], np.uint8))))
    with pytest.raises(DataError, match=r"t10k-labels.*\[0, 9\].*\b10\b"):
        load(folder, TRAIN, TEST)
    (folder / FILES[3]).unlink()
    with pytest.raises(DataError, match="t10k-labels"):
        load(folder, TRAIN, TEST)


def test_fetch_uses_the_next_source_and_leaves_nothing_of_a_failed_one(
    folder, tmp_path, monkeypatch
):
    """A source that fails half way must not leave a file in the folder.

    A later call would take it for the data set.
    """

    def dies(work: Path) -> Path:
        (work / FILES[0]).write_bytes(b"half")
        raise DataError("no network")

    def works(work: Path) -> Path:
        (work / "files").mkdir()
        for name in FILES:
            (work / "files" / name).write_bytes((folder / name).read_bytes())
        return work / "files"

    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "none")
    monkeypatch.setattr(fashion_mnist, "_from_debian", dies)
    monkeypatch.setattr(fashion_mnist, "_from_tensorflow_datasets", dies)
    target = tmp_path / "cache" / "images"
    with pytest.raises(DataError, match=r"(?s)no network.*dataset-fashion-mnist"):
        fetch(target)
    assert list((tmp_path / "cache").iterdir()) == []

    monkeypatch.setattr(fashion_mnist, "_from_tensorflow_datasets", works)
    # The tiny files are not the data set: they are checked before they are kept
    with pytest.raises(DataError, match=r"\(60000, 28, 28\)"):
        fetch(target)
    assert not target.exists()
    monkeypatch.setattr(fashion_mnist, "load", lambda found: None)
    assert fetch(target) == target and sorted(path.name for path in target.iterdir()) == sorted(
        FILES
    )
    monkeypatch.setattr(fashion_mnist, "_from_tensorflow_datasets", dies)
    assert fetch(target) == target  # nothing is fetched twice
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["images"]


@pytest.mark.parametrize("error", [ConfigurationError, PermissionError])
def test_a_user_without_a_home_gets_the_remedy(capsys, monkeypatch, error):
    """The command ended with a traceback."""

    def refuse(*given):
        raise error("no home")

    monkeypatch.setattr(fashion_mnist, "local_path", refuse)
    assert main(["fashion_mnist"]) == 2 and "no home" in capsys.readouterr().err


def test_a_folder_of_the_user_is_filled_and_not_passed_over(folder, tmp_path, monkeypatch):
    """A mistyped one trained on the files of another folder."""
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", folder)
    monkeypatch.setattr(fashion_mnist, "_from_debian", lambda work: folder / "none")
    monkeypatch.setattr(fashion_mnist, "_from_tensorflow_datasets", lambda work: folder / "none")
    with pytest.raises(DataError, match="mistyped"):
        fetch(tmp_path / "mistyped")
    monkeypatch.setattr(fashion_mnist, "local_path", lambda *given: tmp_path / "cache")
    assert fetch() == folder


def test_the_real_images(capsys):
    folder = fetch()  # set-up has put them there, by this command
    assert main(["fashion_mnist"]) == 0 and str(folder) in capsys.readouterr().out
    assert main(["fashion"]) == 2 and "fashion_mnist" in capsys.readouterr().err
    train_x, train_y, test_x, test_y = load(folder)
    assert (
        np.bincount(train_y).tolist() == [6000] * 10 and np.bincount(test_y).tolist() == [1000] * 10
    )
    assert train_y[:5].tolist() == [9, 0, 0, 3, 0]
    assert abs(train_x.mean() / 255 - 0.2860) < 1e-4 and test_x.max() == 255
    assert isinstance(read_idx(folder / FILES[3], (10_000,)), np.ndarray)
