"""Class folders that are most likely not those that a user means."""

from __future__ import annotations

import unicodedata
import warnings
from pathlib import Path

import pytest
from PIL import Image

from tfcommx.collectives.comparisons import Comparisons, Facts
from tfcommx.core import ConfigurationError, DataError, Topology
from tfcommx.data.sources import Folder, find_source
from tfcommx.recipes.datasets import DATASETS
from tfcommx.recipes.families import DataRank

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))


def folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(root / name, "PNG")
    return root


@pytest.mark.parametrize(
    "pair", [("cat", "Cat"), ("dog", "dog "), (COMPOSED, DECOMPOSED)], ids=ascii
)
def test_classes_that_look_alike_are_announced(tmp_path: Path, pair: tuple[str, str]) -> None:
    """Half of a class had another label, without a word."""
    with pytest.warns(UserWarning) as caught:
        Folder(folder(tmp_path, *(f"{name}/{n}.png" for n, name in enumerate((*pair, "x")))))
    (warning,) = caught
    for name in pair:
        assert ascii(name) in str(warning.message)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("1", "2", "10"), "'10' has the label 1"),
        (("train", "val"), "{root}/train"),
        (("Test", "Train"), "{root}/Test"),
    ],
)
def test_names_that_are_no_classes_are_announced(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    """Class 10 had the label 1, and the parts of a data set were its classes."""
    folder(tmp_path, *(f"{name}/1.png" for name in names))
    with pytest.warns(UserWarning) as caught:
        Folder(tmp_path)
    (warning,) = caught
    assert words.format(root=tmp_path) in str(warning.message)


@pytest.mark.parametrize("names", [("01", "02", "10"), ("0", "1", "9"), ("1", "x")])
def test_other_names_are_not(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder(tmp_path, *(f"{name}/1.png" for name in names))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Folder(tmp_path).classes == names


@pytest.mark.parametrize(
    ("file", "remedy"), [("train/cat/1.png", "give {root}/train."), ("images/1.png", "Sort")]
)
def test_a_single_class_is_announced(tmp_path: Path, file: str, remedy: str) -> None:
    """With the folder above that of the classes all samples had the label 0, without a word."""
    folder(tmp_path, file)
    with pytest.warns(UserWarning, match="label 0") as caught:
        Folder(tmp_path)
    assert len(caught) == 1 and remedy.format(root=tmp_path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Folder(tmp_path, (file.partition("/")[0],))


def test_an_order_that_the_user_gave_is_not_doubted(tmp_path: Path) -> None:
    folder(tmp_path, "1/1.png", "2/1.png", "10/1.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Folder(tmp_path, ("10", "2", "1")).classes == ("10", "2", "1")


def test_a_class_without_a_folder_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'dogs'.*'dog'"):
        Folder(folder(tmp_path, "cat/1.png", "dog/1.png"), ("cat", "dogs"))


@pytest.mark.parametrize("link", ["cats", "dog/more"])
def test_pictures_with_two_labels_are_announced(tmp_path: Path, link: str) -> None:
    """A link to another class gave its pictures a second label."""
    folder(tmp_path, "cat/1.png", "dog/1.png")
    (tmp_path / link).symlink_to(tmp_path / "cat")
    with pytest.warns(UserWarning, match=r"'cat' and '(cats|dog)'"):
        assert Folder(tmp_path).count == 3


def test_a_folder_of_records_is_named(tmp_path: Path) -> None:
    """It was said to have no class folders."""
    (tmp_path / "a.tfrecord").write_bytes(b"")
    with pytest.raises(DataError, match="TFRecords"):
        find_source(tmp_path)


def test_pictures_without_classes_are_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\b2 \.png\b"):
        Folder(folder(tmp_path, "1.png", "2.png"))


def test_a_missing_folder_is_named_with_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"{tmp_path}/photos/train "):
        find_source(Path("photos/train"))


def test_copies_whose_names_look_alike_are_told_apart() -> None:
    """Of a Mac's copy, ranks differed in the class '\u00e9', which both of them had."""
    ranks = []
    for name in (COMPOSED, DECOMPOSED):
        comparisons = Comparisons()
        comparisons.state(Facts("samples", "photos", {f"class {name!r}": "1 files"}, ""))
        ranks.append(comparisons)
    rows = [
        [(*facts[:2], dict(facts.values), facts.remedy) for facts in rank._stated] for rank in ranks
    ]
    with pytest.raises(ConfigurationError, match=r"e\\u0301.*\\xe9|\\xe9.*e\\u0301"):
        ranks[0].settle(0, [rank.digests() for rank in ranks], lambda _: rows)


def test_parts_whose_names_look_alike_are_told_apart(tmp_path: Path) -> None:
    folder(tmp_path, f"train/{COMPOSED}/1.png", f"test/{DECOMPOSED}/1.png")
    data = DATASETS["folder"](folder=tmp_path, memory=tmp_path)
    with pytest.raises(DataError, match=r"e\\u0301"):
        data.build(DataRank(Topology(1, 1), 0))
