"""The files of encoded pairs: damage, other vocabularies, and several processes at once."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tfcommx.core import DataError
from tfcommx.recipes.datasets.translations import LinePairs
from tfcommx.recipes.text import corpus
from tfcommx.recipes.text.corpus import open_corpora
from tfcommx.recipes.text.vocabulary import learn


class Rows:
    """Pairs in memory."""

    key = "rows"

    def __init__(self, count: int = 60) -> None:
        self.rows = [(f"the {n} dogs and {n} cats", f"die {n} Hunde") for n in range(count)]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.rows)


def opened(folder: Path) -> list[str]:
    """Return the source sentences for training, decoded."""
    vocabulary, train, _ = open_corpora(Rows(), Rows(5), 80, folder)
    return [vocabulary.decode(train.source[n]) for n in range(len(train.source))]


def test_one_flipped_bit_in_any_file_is_refused(tmp_path: Path) -> None:
    """Other words were trained on, or a number beyond the vocabulary: its files had no checksum."""
    assert opened(tmp_path) == [row[0] for row in Rows().rows]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) == 11
    chance = random.Random(0)
    for path in files:
        whole = path.read_bytes()
        for at in [0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(20))]:
            changed = bytearray(whole)
            changed[at] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(DataError, match=str(tmp_path)):
                opened(tmp_path)
        path.write_bytes(whole)
    assert len(opened(tmp_path)) == 60


def test_pairs_that_another_vocabulary_has_encoded_are_refused(tmp_path: Path) -> None:
    """Another version of SentencePiece had learnt it, or it had been copied alone."""
    opened(tmp_path)
    (path,) = tmp_path.rglob("vocabulary")
    path.write_bytes(learn(["other words than those"] * 5, 40))
    with pytest.raises(DataError, match=rf"{path}.*Delete"):
        opened(tmp_path)


def test_a_file_system_without_locks_takes_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Lustre without `-o flock` a recipe of text ended with an error of flock."""

    def refuse(opened: object, kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert len(opened(tmp_path)) == 60


def test_processes_that_do_not_see_each_others_locks_end_with_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each node has its own locks, the second one ended: Directory not empty."""
    encode = corpus._encode

    def encoded_by_another(pairs: object, vocabulary: object, cached: Path, name: str) -> None:
        if not (cached / name).exists():  # The other node is a little faster
            monkeypatch.setattr(corpus, "_encode", encode)
            encode(pairs, vocabulary, cached, name)
            shutil.copytree(cached / name, tmp_path / f"first-{name}")
        encode(pairs, vocabulary, cached, name)

    monkeypatch.setattr(corpus, "_encode", encoded_by_another)
    assert len(opened(tmp_path / "kept")) == 60
    (train,) = (tmp_path / "kept").rglob("train")
    for path in (tmp_path / "first-train").iterdir():
        assert (train / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in train.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.extended
def test_a_process_that_was_killed_leaves_no_half_files(tmp_path: Path) -> None:
    """At each write in turn; the next process makes the missing files."""
    for number in range(40):
        if not (child := os.fork()):
            die_at(number)
            opened(tmp_path)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert opened(tmp_path) == [row[0] for row in Rows().rows]
        if status == 0:  # It had fewer writes
            break
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
    assert number > 8


def die_at(number: int) -> None:
    """End this process by SIGKILL in front of its write of that number."""
    left = [number]

    def deadly(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            if left[0] == 0:
                os.kill(os.getpid(), 9)
            left[0] -= 1
            return real(*args, **options)

        setattr(os, name, call)

    for name in ("replace", "fsync", "mkdir"):
        deadly(name)
    save = np.save

    def save_half(path: Path, array: np.ndarray) -> None:
        if left[0] == 0:
            Path(path).write_bytes(b"\x93NUMPY half")
            os.kill(os.getpid(), 9)
        left[0] -= 1
        save(path, array)

    np.save = save_half


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    """Its new pairs were kept under the key of the old ones, and served when it was put back."""
    for name in "ab":
        (tmp_path / name).write_text("one\ntwo\n")
    pairs = LinePairs(tmp_path / "a", tmp_path / "b")
    assert list(pairs) == [("one", "one"), ("two", "two")]
    status = (tmp_path / "a").stat()
    (tmp_path / "a").write_text("one\nten\n")
    os.utime(tmp_path / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=rf"{tmp_path / 'a'}\b.*again"):
        list(pairs)
