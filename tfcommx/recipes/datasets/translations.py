"""Data sets of translations: text files, TensorFlow Datasets, and messages of programs.

The messages are English, with German translations, from the gettext catalogues of Debian packages:
labels, errors and help that people wrote and translated. They do not teach general German, but they
are real text, and available where no other data set is.
"""

from __future__ import annotations

import gettext
import hashlib
import itertools
import os
import re
import tempfile
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from tfcommx.core import DataError, local_path
from tfcommx.data.sources import tfrecord
from tfcommx.data.sources.source import key_of
from tfcommx.recipes.datasets import debian
from tfcommx.recipes.families import Data, DataRank
from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    from tfcommx.recipes.text.corpus import Pairs


class Translations(RecipePart):
    """Settings of every data set of translations: the vocabulary and its folder."""

    # Word pieces of both languages together, including the four marks
    vocabulary: int = Field(8000, ge=32)
    # Folder for the vocabulary and the encoded sentences, on a disk of each node
    kept: Path = Path("~/.cache/tfcommx/text")

    def open(self, train: Pairs, test: Pairs, place: DataRank) -> Data:
        """Open training and test pairs on this rank."""
        from tfcommx.recipes.datasets.sentence_pairs import SentencePairs

        return SentencePairs(
            train, test, self.vocabulary, local_path("data.kept", self.kept), place
        )


class LinePairs:
    """Two files of equal length in lines; line n of the second translates line n of the first.

    **Cost:** one read of both files, for the key.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.files = source, target
        self.digests: list[str] = []
        for file in self.files:
            try:
                with open(file, "rb") as content:
                    self.digests.append(hashlib.file_digest(content, "sha256").hexdigest())
            except OSError as error:
                raise DataError(f"{file}: {error.strerror}. Check the path.") from error
        self.key = key_of(("lines", *self.digests))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Return the pairs without those that have an empty side.

        A warning counts lines that are not in Unicode's normal form NFC.
        **Raises:** DataError for files of unequal length, a file that is not UTF-8, or one that has
        changed since the key was made.
        """
        sides = map(_lines, self.files, self.digests)
        number, decomposed = 0, [0, 0]
        # `zip` would end with the shorter file, and hide that lines are missing
        for number, (source, target) in enumerate(itertools.zip_longest(*sides), 1):
            if source is None or target is None:
                short = self.files[0 if source is None else 1]
                raise DataError(
                    f"Files with as many lines are required. {short} ends before line {number}."
                )
            for side, text in enumerate((source, target)):
                decomposed[side] += not unicodedata.is_normalized("NFC", text)
            if source and target:
                yield source, target
        for file, count in zip(self.files, decomposed, strict=True):
            if count:
                warnings.warn(
                    f"{file}: {count:,} of {number:,} lines are not in Unicode's normal form NFC, "
                    "as text of a Mac. The vocabulary and BLEU take their letters for others than "
                    "those of text in NFC. Convert all files, such as by uconv -x any-nfc.",
                    stacklevel=2,
                )


def _lines(file: Path, digest: str) -> Iterator[str]:
    """Return the lines of a UTF-8 file, without white space and byte order marks around them."""
    read = hashlib.sha256()
    try:
        # As bytes, where only a line feed ends a line: a carriage return, a form feed or one of
        # Unicode's line separators inside a sentence would shift all later pairs
        with open(file, "rb") as content:
            for number, line in enumerate(content, 1):
                read.update(line)
                try:
                    text = line.decode()
                    # UTF-16 without a mark is UTF-8, too, with zeros between the letters
                    if "\0" in text:
                        raise ValueError("it has a zero byte")
                except ValueError as error:
                    raise DataError(
                        f"Text in UTF-8 is required. Line {number} of {file} is none: {error}. "
                        "Unpack a compressed file (gzip, ZIP), or convert the text, such as by "
                        "iconv -f LATIN1 -t UTF-8, or from UTF-16."
                    ) from error
                if "\r" in text.rstrip("\r\n") and number == 1 and not text.endswith("\n"):
                    raise DataError(
                        f"Lines that end with a line feed are required. {file} has carriage "
                        "returns alone, as of old Macs. Convert it: tr '\\r' '\\n'."
                    )
                # Some editors write a byte order mark before the text, which stays in the middle of
                # joined files
                yield text.strip().strip("\ufeff\u200b").strip()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}. Check the path.") from error
    # Because encoded pairs are kept under the key of the contents at the start
    if read.hexdigest() != digest:
        raise DataError(
            f"A file that does not change during its reading is required. Received {file}, whose "
            "contents are not those at the start. Start again."
        )


class TextFiles(Translations):
    """Pairs in line-aligned text files, UTF-8."""

    name: Literal["text_files"] = "text_files"
    # Sentences of the source language, one per line
    source: Path
    # Their translations: line n translates line n
    target: Path
    # Source sentences of the evaluation
    test_source: Path
    # Their translations
    test_target: Path

    def build(self, place: DataRank) -> Data:
        """Open the files on this rank. **Raises:** DataError for missing or unequal files."""
        train = LinePairs(self.source, self.target)
        return self.open(train, LinePairs(self.test_source, self.test_target), place)


class PreparedPairs:
    """A split of a prepared translation data set of TensorFlow Datasets."""

    def __init__(self, builder: Any, split: str, languages: tuple[str, str]) -> None:
        self.builder, self.split, self.languages = builder, split, languages
        try:
            count = int(builder.info.splits[split].num_examples)
        except (KeyError, ValueError) as error:
            raise DataError(
                f"A split of {builder.info.full_name} is required, such as train[:1000]. Received "
                f"{split!r}: {' '.join(str(error).split())[:200]}"
            ) from error
        # With their number, because a part of a data set may have been prepared in another folder
        self.key = key_of(("tfds", builder.info.full_name, split, count, *languages))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        import tensorflow_datasets

        source, target = self.languages
        for pair in tensorflow_datasets.as_numpy(self.builder.as_dataset(split=self.split)):
            yield pair[source].decode().strip(), pair[target].decode().strip()


class TensorFlowTranslations(Translations):
    """Translations of TensorFlow Datasets by name, such as wmt17_translate/de-en.

    Prepare it before a run on several nodes, `python -c "import tensorflow_datasets as tfds;
    tfds.load('wmt17_translate/de-en')"`, because otherwise a rank of each node downloads it.
    """

    name: Literal["tfds_translate"] = "tfds_translate"
    dataset: str = "wmt17_translate/de-en"
    source: str = "en"
    target: str = "de"
    train: str = "train"
    test: str = "validation"
    # Folder of prepared data sets; None: the library's default
    folder: Path | None = None

    def fetch(self) -> Path | None:
        """Download and prepare the data set, unless it is prepared already."""
        self._prepared()
        return self.folder

    def build(self, place: DataRank) -> Data:
        """Open it on this rank. **Raises:** DataError for unknown data sets and splits."""
        builder, languages = self._prepared(), (self.source, self.target)
        train, test = (
            PreparedPairs(builder, split, languages) for split in (self.train, self.test)
        )
        return self.open(train, test, place)

    def _prepared(self) -> Any:
        builder = tfrecord.builder_of(self.dataset, self.folder)
        missing = {self.source, self.target} - set(builder.info.features)
        if missing:
            raise DataError(
                f"{self.dataset} has the features {sorted(builder.info.features)}, not "
                f"{sorted(missing)}. Name two of them as source and target."
            )
        return tfrecord.prepared(self.dataset, self.folder)


PACKAGES = (
    "coreutils",
    "gcc-12-locales",
    "gimp-data",
    "git",
    "gnucash-common",
    "inkscape",
    "iso-codes",
)
LOCALES = Path("usr/share/locale/de/LC_MESSAGES")
# One message in 40 is for evaluation; a hash of the English text selects it
ONE_IN = 40


def catalogue_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Return the messages of one catalogue with their translations, cleaned.

    Messages without a translation, without letters or with several lines are omitted.
    """
    with open(path, "rb") as file:
        try:
            # Private, because the module has no public list of messages
            messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        # Any exception, because a damaged file can fail in struct, a codec or the plural rule
        except Exception as error:
            raise DataError(
                f"{path} is no catalogue: {error}. Delete it and fetch again."
            ) from error
    for key, translation in messages.items():
        if isinstance(key, tuple) and key[1]:
            continue  # (message, number): plural forms; the singular is number 0
        # A message may be preceded by a context
        message = str(key[0] if isinstance(key, tuple) else key).rpartition("\x04")[2]
        source, target = (_cleaned(text) for text in (message, str(translation)))
        if source and target and source != target and re.search("[a-z]{2}", source):
            yield source, target


def _cleaned(text: str) -> str:
    """Return the text as one line; empty if it has several lines."""
    text = text.strip()
    if "\n" in text:
        return ""
    if text.count("_") == 1:
        # A single underscore marks a menu's shortcut; identifiers have several
        text = text.replace("_", "")
    return " ".join(text.split())


class CataloguePairs:
    """The messages of all catalogues in a folder, each English text once."""

    def __init__(self, folder: Path, test: bool) -> None:
        pairs = {
            source: target
            # Sorted, because the last catalogue with a text decides, and a folder has no order
            for path in sorted(folder.glob("*.mo"))
            # Not hidden files, such as the resource fork (._de.mo) of a file copied from a Mac
            if not path.name.startswith(".")
            for source, target in catalogue_pairs(path)
        }
        self.pairs = [pair for pair in pairs.items() if _is_test(pair[0]) == test]
        self.key = key_of(("catalogues", test, *self.pairs))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.pairs)


def _is_test(source: str) -> bool:
    # By the text alone, so that more catalogues move no message between training and test
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % ONE_IN == 0


class Catalogues(Translations):
    """Messages of programs, English to German, from some of Debian's packages."""

    name: Literal["catalogues"] = "catalogues"
    # Folder of the catalogues; None: they are downloaded
    folder: Path | None = None

    def fetch(self) -> Path:
        """Return the folder of the catalogues; download them if they are not on this machine.

        **Raises:** DataError if the download fails.
        """
        target = self.folder or local_path("data.folder", "~/.cache/tfcommx/catalogues-de")
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, because a folder cannot be renamed onto another file system
        with tempfile.TemporaryDirectory(prefix=".catalogues-", dir=target.parent) as work:
            try:
                unpacked = debian.unpack(PACKAGES, Path(work)) / LOCALES
            except (DataError, OSError) as error:
                raise DataError(
                    f"Catalogues are required in {target}, and could not be fetched: {error}. Put "
                    f".mo files there, such as those of {LOCALES} of a Debian machine."
                ) from error
            try:
                # Renamed when complete, because another process may look for the folder at any time
                os.replace(unpacked, target)
            except OSError:
                # Not an error if another process has put the folder there first
                if not target.is_dir():
                    raise
        return target

    def build(self, place: DataRank) -> Data:
        folder = self.fetch()
        return self.open(CataloguePairs(folder, False), CataloguePairs(folder, True), place)
