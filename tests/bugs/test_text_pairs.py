"""Sentence pairs from two files of lines."""

from __future__ import annotations

import gzip
import os
import unicodedata
from pathlib import Path

import pytest

from tfcommx.core import DataError, Topology
from tfcommx.recipes.datasets.sentence_pairs import SentencePairs
from tfcommx.recipes.datasets.translations import LinePairs
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.tasks.translate import Translate, Translation
from tfcommx.recipes.text.vocabulary import learn

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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"a\nb\n"), "gzip"),
        ("a\nb\n".encode("utf-16"), "UTF-16"),
        ("a\nb\n".encode("utf-16-be"), "UTF-16"),
        (b"PK\x03\x04\x14\0", "ZIP"),
        (b"a\rb\r", "carriage returns"),
    ],
    ids=["gzip", "UTF-16", "UTF-16 without a mark", "document", "old Mac"],
)
def test_a_file_that_is_no_text_is_named_by_its_kind(
    tmp_path: Path, content: bytes, words: str
) -> None:
    """UTF-16 without a mark was text with zero bytes, and a Mac's file was a single sentence."""
    with pytest.raises(DataError, match=rf"b\.txt.*{words}"):
        pairs(tmp_path, b"c\nd\n", content)


def test_marks_of_joined_files_are_no_part_of_a_sentence(tmp_path: Path) -> None:
    """`cat a.txt b.txt` leaves the byte order mark of the second file in a line."""
    marked = "\ufeffa\n\ufeffb\n\u200b\n".encode()
    assert pairs(tmp_path, marked, b"c\nd\ne\n") == [("a", "c"), ("b", "d")]


def test_an_error_in_the_text_is_that_error(tmp_path: Path) -> None:
    """The library that learns the vocabulary made a RuntimeError of it, with a traceback."""
    (tmp_path / "a").write_text("one\n" * 9)
    (tmp_path / "b").write_text("eins\n" * 8)
    uneven = LinePairs(tmp_path / "a", tmp_path / "b")
    with pytest.raises(DataError, match=r"\b9\b"):
        learn((side for pair in uneven for side in pair), 60)


def test_a_text_without_lines_is_named() -> None:
    """Sentences of more than 4,192 bytes teach nothing: `!sentences_.empty()`."""
    with pytest.raises(DataError, match="4,192"):
        learn(["word " * 1000], 60)


def test_a_vocabulary_smaller_than_the_alphabet_is_named() -> None:
    """The message asked for shorter sentences; Chinese text has thousands of characters."""
    with pytest.raises(DataError, match=r"\b40\b.*`vocabulary`"):
        learn((chr(0x4E00 + number) * 3 for number in range(90)), 40)


def opened(folder: Path, lines: str, ranks: int = 2) -> SentencePairs:
    (folder / "lines").write_text(lines)
    same = LinePairs(folder / "lines", folder / "lines")
    return SentencePairs(same, same, 60, folder / "kept", DataRank(Topology(1, ranks), 0))


def test_pairs_that_are_too_long_are_counted(tmp_path: Path) -> None:
    """They were left out without a word, also if they were all: epochs without a step."""
    data = opened(tmp_path, "one\n" * 30 + "one two three four five six seven eight\n" * 10)
    with pytest.warns(UserWarning, match=r"\b10 of 40\b"):
        assert data.steps(16, 8) > 0
    for batch, resolution, counts in ((10_000, 100, "0 of 40"), (8, 1, "40 of 40")):
        with pytest.raises(DataError, match=counts):
            data.steps(batch, resolution)


@pytest.mark.parametrize(("tokenizer", "score"), [("13a", 0), ("zh", 100), ("char", 100)])
def test_bleu_of_a_language_without_spaces(tokenizer: str, score: float) -> None:
    """An exact translation into Chinese had the score 0, because it is a single word to "13a"."""
    exact = "\u6211\u559c\u6b22\u5403\u82f9\u679c"
    data = type("Data", (), {"references": [exact]})()
    translation = Translation(data, Translate(bleu_tokenizer=tokenizer))
    assert translation._bleu({0: exact}) == pytest.approx(score)


def test_decomposed_letters_are_counted(tmp_path: Path) -> None:
    """The vocabulary and BLEU took the same words for different ones, without a warning."""
    composed, decomposed = "fünf Äpfel", unicodedata.normalize("NFD", "fünf Äpfel")
    (tmp_path / "a").write_text(f"one\n{composed}\n")
    (tmp_path / "b").write_text(f"{decomposed}\ntwo\n")
    pairs = LinePairs(tmp_path / "a", tmp_path / "b")
    with pytest.warns(UserWarning, match=r"b: 1 of 2 .*NFC") as caught:
        assert list(pairs) == [("one", decomposed), (composed, "two")]
    assert len(caught) == 1
