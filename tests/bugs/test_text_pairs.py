"""Sentence pairs from two files of lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfcommx.core import DataError
from tfcommx.recipes.datasets.translations import LinePairs

# Characters at which str.splitlines, or a file opened as text, ends a line
SEPARATORS = ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
WANTED = [(f"source {n}", f"target {n}") for n in range(1, 9)]


def pairs(folder: Path, source: bytes, target: bytes) -> list[tuple[str, str]]:
    (folder / "a.txt").write_bytes(source)
    (folder / "b.txt").write_bytes(target)
    return list(LinePairs(folder / "a.txt", folder / "b.txt"))


def numbers(found: list[tuple[str, str]]) -> list[list[str]]:
    return [[text.split()[-1] for text in pair] for pair in found]


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_a_separator_inside_a_sentence_does_not_shift_the_pairs(
    tmp_path: Path, separator: str
) -> None:
    """A lone carriage return ended a line in one file only: all pairs after it were wrong.

    Two files with one such character each have as many lines again, so nothing was refused.
    """
    source, target = ([f"{side} {n}" for n in range(1, 9)] for side in ("source", "target"))
    source[1], target[5] = f"source{separator}2", f"target{separator}6"
    found = pairs(tmp_path, "\n".join(source).encode() + b"\n", "\n".join(target).encode() + b"\n")
    assert numbers(found) == [[str(n)] * 2 for n in range(1, 9)]


@pytest.mark.parametrize("ends", [("\n", "\r\n"), ("\r\n", "\n"), ("\r\n", "\r\n")], ids=ascii)
@pytest.mark.parametrize("last", [True, False], ids=["ended", "without a last line feed"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "mark"])
def test_files_of_different_systems_are_pairs(
    tmp_path: Path, ends: tuple[str, str], last: bool, mark: str
) -> None:
    """The byte order mark became part of the first word."""
    texts = [
        mark + end.join(pair[side] for pair in WANTED) + end * last for side, end in enumerate(ends)
    ]
    assert pairs(tmp_path, *(text.encode() for text in texts)) == WANTED


@pytest.mark.parametrize(
    ("content", "line"), [(b"a\nb\xff\nc\n", 2), ("a\nb\nc\n".encode("utf-16"), 1)]
)
def test_text_in_another_encoding_is_named(tmp_path: Path, content: bytes, line: int) -> None:
    """It was a UnicodeDecodeError without file and line."""
    with pytest.raises(DataError, match=rf"\b{line} .*b\.txt"):
        pairs(tmp_path, b"a\nb\nc\n", content)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    (tmp_path / "b.txt").write_text("b\n")
    with pytest.raises(DataError, match=r"a\.txt\b.*directory"):
        list(LinePairs(tmp_path / "a.txt", tmp_path / "b.txt"))


def test_other_text_of_equal_length_and_time_is_encoded_anew(tmp_path: Path) -> None:
    """The words of an earlier run were trained on in its place."""
    keys = set()
    for text in ("one", "two", "one"):
        (tmp_path / "a.txt").write_text(text)
        os.utime(tmp_path / "a.txt", (0, 0))
        keys.add(LinePairs(tmp_path / "a.txt", tmp_path / "a.txt").key)
    assert len(keys) == 2
