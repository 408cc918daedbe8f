"""Encoded pairs of sentences, in files that all ranks of a node map into memory.

folder/6a09e667f3bcc908b2fb/     a digest of the pairs and of the vocabulary's size
  vocabulary                     word pieces, as SentencePiece writes them
  train/, test/                  the encoded pairs, and the CRCs of these files
"""

import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from tfcommx.core import DataError, reading, replacing
from tfcommx.core.files import crc_of, others_wait
from tfcommx.data.sources.source import key_of
from tfcommx.recipes.text.vocabulary import Vocabulary, learn

# Number of pairs that are encoded together
CHUNK = 10_000
# Version of the file format
FORMAT = 5
# Files of encoded pairs
ENCODED = ("source.npy", "source_starts.npy", "target.npy", "target_starts.npy")
# File in a folder of encoded pairs: name -> CRC of each file, and of the vocabulary
CHECKSUMS = "checksums.json"


class Pairs(Protocol):
    """Pairs of sentences, each a text and its translation."""

    # Hexadecimal hash that identifies the contents
    key: str

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Iterate over the pairs, in the same order each time."""


@dataclass(frozen=True)
class Sentences:
    """Sentences of different lengths, concatenated in one array."""

    # Word numbers of all sentences, int32
    words: np.ndarray
    # Start of each sentence, and the end of the last, int64 [n + 1]
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.words[self.starts[number] : self.starts[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Number of words of each sentence, int64 [n]."""
        return np.diff(self.starts)


@dataclass(frozen=True)
class Corpus:
    """Sentences and their translations, each with END as its last word."""

    source: Sentences
    target: Sentences


def open_corpora(
    train: Pairs, test: Pairs, size: int, folder: Path
) -> tuple[Vocabulary, Corpus, Corpus]:
    """Learn the vocabulary and encode all pairs, or open the files of an earlier run.

    Args:
        train: pairs for training; the vocabulary is learnt from both of their languages.
        folder: folder of vocabulary and encoded pairs, on a disk of the node.

    **Ranks:** all; the first one of a node does the work while the others wait. **Cost:** one read
    of the encoded pairs, to compare their CRCs.
    **Raises:** DataError without pairs of either kind, and for files that are damaged.
    """
    # All that the files depend on is in the name, so that another data set or size never opens them
    cached = folder / key_of((FORMAT, train.key, test.key, size))[:20]
    cached.mkdir(parents=True, exist_ok=True)
    with others_wait(cached / "lock"):
        if not (cached / "vocabulary").exists():
            lines = (line for pair in train for line in pair)
            first = next(lines, None)
            if first is None:
                raise DataError("Pairs of sentences are required. There are none.")
            with replacing(cached / "vocabulary") as part:
                part.write_bytes(learn(itertools.chain([first], lines), size))
        path = cached / "vocabulary"
        with reading(
            "A vocabulary", path, f"Delete the folder {cached}: it is learnt anew.", DataError
        ):
            vocabulary = Vocabulary(path.read_bytes())
        for name, pairs in (("train", train), ("test", test)):
            if not (cached / name).exists():
                _encode(pairs, vocabulary, cached, name)
    # Outside of the lock, because all ranks of a node can read at once
    for name in ("train", "test"):
        _check(cached / name, path)
    tests = _open(cached / "test")
    if not len(tests.source):
        raise DataError("Test pairs of sentences are required. There are none.")
    return vocabulary, _open(cached / "train"), tests


def _encode(
    pairs: Iterable[tuple[str, str]], vocabulary: Vocabulary, cached: Path, name: str
) -> None:
    """Encode all pairs into files of a folder, which is renamed into `cached` when complete."""
    words: tuple[list[np.ndarray], ...] = ([], [])
    lengths: tuple[list[int], ...] = ([], [])
    remaining = iter(pairs)
    while chunk := list(itertools.islice(remaining, CHUNK)):
        for side in (0, 1):
            rows = vocabulary.encode([pair[side] for pair in chunk])
            # An array per chunk, because a list of Python's numbers takes some nine times as much
            words[side].append(np.fromiter(itertools.chain(*rows), np.int32))
            lengths[side].extend(map(len, rows))
    # Inside `cached`, because a folder cannot be renamed onto another file system
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cached) as work:
        complete = Path(work, name)
        complete.mkdir()
        for side, language in enumerate(("source", "target")):
            # The empty array is for a set without pairs: `concatenate` refuses an empty list
            np.save(
                complete / f"{language}.npy", np.concatenate([*words[side], np.zeros(0, np.int32)])
            )
            starts = np.cumsum([0, *lengths[side]], dtype=np.int64)
            np.save(starts_of(complete / f"{language}.npy"), starts)
        crcs = {path.name: crc_of(path) for path in complete.iterdir()}
        # By another vocabulary the same numbers would be other words
        crcs["vocabulary"] = crc_of(cached / "vocabulary")
        (complete / CHECKSUMS).write_text(json.dumps(crcs))
        try:
            os.replace(complete, cached / name)
        except OSError:
            # A process whose lock this one does not see, as on another node, was first
            if not (cached / name).is_dir():
                raise


def _check(folder: Path, vocabulary: Path) -> None:
    """Compare the CRCs of encoded pairs, and of the vocabulary that they were encoded by."""
    remedy = f"Delete the folder {folder.parent}: its files are made anew."
    with reading("A table of checksums", folder / CHECKSUMS, remedy, DataError):
        crcs = dict(json.loads((folder / CHECKSUMS).read_text()))
        _require({*ENCODED, vocabulary.name} == crcs.keys(), "other names of files")
    for name, crc in crcs.items():
        path = vocabulary if name == vocabulary.name else folder / name
        with reading("A file of encoded sentences", path, remedy, DataError):
            _require(crc_of(path) == crc, "a wrong checksum")


def starts_of(words: Path) -> Path:
    """Return the path of the sentence starts that belong to a file of words."""
    return words.with_name(f"{words.stem}_starts.npy")


def _open(folder: Path) -> Corpus:
    paths = (folder / f"{language}.npy" for language in ("source", "target"))
    return Corpus(*(Sentences(np.load(p, mmap_mode="r"), np.load(starts_of(p))) for p in paths))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
