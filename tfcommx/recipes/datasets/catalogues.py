"""English messages of programs and their German translations, from Debian packages.

Gettext catalogues hold messages that people wrote and translated: labels, errors, help. They do not
teach general German, but they are real text, and available where nothing else is.
"""

from __future__ import annotations

import gettext
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tfcommx.recipes.base import Data, DataError, Place
from tfcommx.recipes.datasets import debian
from tfcommx.recipes.datasets.translations import Translations

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
# One message in 40 is for evaluation, chosen by a hash of the English text
ONE_IN = 40


def catalogue_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Return the messages of one catalogue with their translations, cleaned.

    Messages without translation, without letters or with several lines are left out.
    """
    with open(path, "rb") as file:
        try:
            # The module has no public list of messages
            messages = gettext.GNUTranslations(file)._catalog
        # A damaged file ends it anywhere: in struct, in a codec, in the rule of plural forms
        except Exception as error:
            raise DataError(
                f"{path} is no catalogue: {error}. Delete it and fetch again."
            ) from error
    for key, translation in messages.items():
        if isinstance(key, tuple) and key[1]:
            continue  # (message, number): plural forms; the singular is number 0
        # A context stands before the message
        message = str(key[0] if isinstance(key, tuple) else key).rpartition("\x04")[2]
        source, target = (_cleaned(text) for text in (message, str(translation)))
        if source and target and source != target and re.search("[a-z]{2}", source):
            yield source, target


def _cleaned(text: str) -> str:
    """Return one line; empty if there are several."""
    text = text.strip()
    if "\n" in text:
        return ""
    if text.count("_") == 1:
        # Marks a menu's shortcut; identifiers have more
        text = text.replace("_", "")
    return " ".join(text.split())


class CataloguePairs:
    """The messages of all catalogues in a folder, each English text once."""

    def __init__(self, folder: Path, test: bool) -> None:
        from tfcommx.data.sources.base import key_of

        pairs = {
            source: target
            for path in sorted(folder.glob("*.mo"))
            # Hidden files, such as the second half (._de.mo) of a file that was copied from a Mac
            if not path.name.startswith(".")
            for source, target in catalogue_pairs(path)
        }
        self.pairs = [pair for pair in pairs.items() if _is_test(pair[0]) == test]
        self.key = key_of(("catalogues", test, *self.pairs))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.pairs)


def _is_test(source: str) -> bool:
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % ONE_IN == 0


class Catalogues(Translations):
    """Messages of programs, English to German, out of some of Debian's packages."""

    name: Literal["catalogues"] = "catalogues"
    # Of the catalogues; None: they are downloaded
    folder: Path | None = None

    def fetch(self) -> Path:
        """Return the folder of the catalogues; download them if they are not on this machine.

        **Raises:** DataError if that fails.
        """
        target = self.folder or Path.home() / ".cache" / "tfcommx" / "catalogues-de"
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".catalogues-", dir=target.parent) as work:
            try:
                found = debian.unpack(PACKAGES, Path(work)) / LOCALES
            except (DataError, OSError) as error:
                raise DataError(
                    f"Catalogues are required in {target}, and could not be fetched: {error}. Put "
                    f".mo files there, such as those of {LOCALES} of a Debian machine."
                ) from error
            try:
                os.replace(found, target)
            except OSError:
                # Another process was faster
                if not target.is_dir():
                    raise
        return target

    def build(self, place: Place) -> Data:
        folder = self.fetch()
        return self.open(CataloguePairs(folder, False), CataloguePairs(folder, True), place)
