"""The interface of a source of samples.

A source numbers its samples 0 to count - 1 and never renumbers them, gives the encoded bytes of any
of them in any order and from any thread, and names its contents by a key that changes when they do.

It may also have `contents`, a dictionary of what a copy on another node must have equally: a class
or a file -> its samples, bytes, and the start of a digest. The key will not do for that, because it
has the times at which files were copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from tfcommx.core import DataError

# Most pixels of an image, unless the user allows more: 512 MiB of red, green and blue. Pillow opens
# no larger ones either. Each of the threads that fill the cache may decode such an image.
MAX_PIXELS = 178_956_970


class SampleError(DataError):
    """A sample that cannot be read or decoded; the message names where it comes from."""


class Source(Protocol):
    """Numbered samples, each encoded bytes (or pixels) and an integer label."""

    # For people.
    name: str
    # Number of samples.
    count: int
    # Names of the labels 0, 1, ...; empty if unknown.
    classes: tuple[str, ...]
    # Of the decoded pixels, in [1, 4].
    channels: int
    # Height and width, pixels, if all samples have the same; else None.
    shape: tuple[int, int] | None
    # Hexadecimal hash of what identifies the contents.
    key: str

    def read(self, sample: int) -> tuple[bytes | np.ndarray, int]:
        """Return (encoded image, label); pixels uint8 [h, w, c] if nothing is encoded.

        **Raises:** OSError, SampleError.
        """
        ...

    def where(self, sample: int) -> str:
        """Say where a sample comes from: a path, a record of a file."""
        ...


def key_of(parts: Iterable[object]) -> str:
    """Return the SHA-256, hexadecimal, of the parts' texts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def contents_of(source: Source) -> dict[str, str]:
    """Return item -> value of all that copies of a source on several nodes must have equally."""
    contents: Mapping[str, str] = getattr(source, "contents", {})
    return {
        "samples": f"{source.count}",
        "channels": f"{source.channels}",
        **contents,
        **{f"label {label}": name for label, name in enumerate(source.classes)},
    }
