"""The interface of a source of samples.

A source numbers its samples 0 to count - 1 and never renumbers them. It returns the encoded bytes
of any of them in any order and from any thread, and identifies its contents by a key that changes
when they do.

It may also have `contents`, a dictionary that must be equal for a copy on another node: a class or
a file -> its samples, bytes, and the start of a digest. The key cannot serve for that, because it
contains the times at which files were copied.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from tfcommx.core import DataError

# Default of the largest number of pixels of an image: 512 MiB of red, green and blue, as in Pillow.
# Each of the threads that fill the cache may decode such an image
MAX_PIXELS = 178_956_970


class SampleError(DataError):
    """A sample that cannot be read or decoded; the message names its origin."""


class Source(Protocol):
    """Numbered samples, each encoded bytes (or pixels) and an integer label."""

    # Name in messages
    name: str
    # Number of samples
    count: int
    # Names of the labels 0, 1, ...; empty if unknown
    classes: tuple[str, ...]
    # Channels of the decoded pixels, in [1, 4]
    channels: int
    # Height and width in pixels if equal for all samples, otherwise None
    shape: tuple[int, int] | None
    # Hexadecimal hash that identifies the contents
    key: str

    def read(self, sample: int) -> tuple[bytes | np.ndarray, int]:
        """Return (encoded image, label), or (pixels uint8 [h, w, c], label) for decoded images.

        **Raises:** OSError, SampleError.
        """

    def where(self, sample: int) -> str:
        """Return the origin of a sample, for messages: a path, or a record of a file."""


def key_of(parts: Iterable[object]) -> str:
    """Return the SHA-256, hexadecimal, of the parts' texts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def contents_of(source: Source) -> dict[str, str]:
    """Return item -> value for all items that must be equal in all copies of a source."""
    contents: Mapping[str, str] = getattr(source, "contents", {})
    return {
        "samples": f"{source.count}",
        "channels": f"{source.channels}",
        **contents,
        **{f"label {label}": name for label, name in enumerate(source.classes)},
    }
