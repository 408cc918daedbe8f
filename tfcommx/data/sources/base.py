"""What a source of samples is, and how its bytes become pixels.

A source numbers its samples 0 to count - 1 for good, gives the encoded bytes of any of them in any
order and from any thread, and names its contents by a key that changes when they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"  # how their files begin


class SampleError(ValueError):
    """A sample that cannot be read or decoded; the message names where it comes from."""


class Source(Protocol):
    """Numbered samples, each encoded bytes (or pixels) and an integer label."""

    # For people
    name: str
    # Samples
    count: int
    # Names of the labels 0, 1, ...; empty where unknown
    classes: tuple[str, ...]
    # Of the decoded pixels
    channels: int
    # Height and width where all samples have the same
    shape: tuple[int, int] | None
    # Hexadecimal hash of what identifies the contents
    key: str

    def read(self, sample: int) -> tuple[bytes | np.ndarray, int]:
        """Return (encoded image, label); pixels uint8 [h, w, c] where nothing is encoded. OSError,
        SampleError.
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


def _halve(image: np.ndarray) -> np.ndarray:
    """Average 2 x 2 pixels, rounded; an odd last row or column is left out."""
    even = image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2].astype(np.uint16)
    return (
        (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2] + 2) >> 2
    ).astype(np.uint8)


def stored_size(height: int, width: int, store: int | None) -> tuple[int, int]:
    """Return the size at which an image is kept: its short side `store` pixels, the aspect kept,
    never enlarged.
    """
    short = min(height, width)
    if store is None or short <= store:
        return height, width
    return max(1, round(height * store / short)), max(1, round(width * store / short))


def shrink(image: np.ndarray, store: int | None) -> np.ndarray:
    """Shrink an image, uint8 [h, w, c], to `stored_size`: halvings, then bilinear interpolation by
    a factor below 2.
    """
    from tfcommx.data.cache.batches import resize

    size = stored_size(*image.shape[:2], store)
    if size == image.shape[:2]:
        return image
    while min(image.shape[:2]) // 2 >= store:
        image = _halve(image)
    return image if image.shape[:2] == size else resize(image, size)


def _has_colours(bitmap: bytes) -> bool:
    """Does a BMP have a table of colours, other than number i for grey i? **Source:** Microsoft,
    BITMAPINFOHEADER.
    """
    pixels_at, head, bits = (
        int.from_bytes(bitmap[at : at + size], "little") for at, size in ((10, 4), (14, 4), (28, 2))
    )
    table = bitmap[14 + head : max(14 + head, pixels_at)]
    colours = np.frombuffer(table[: len(table) // 4 * 4], np.uint8).reshape(-1, 4)[:, :3]
    return 0 < bits <= 8 and not np.array_equal(
        colours, np.arange(len(colours))[:, None].repeat(3, 1)
    )


def decode(data: bytes | np.ndarray, channels: int, store: int | None = None) -> np.ndarray:
    """Decode an image (JPEG, PNG, GIF, BMP, told by its bytes and not by its name) to uint8 [h, w,
    channels], at `stored_size`.

    JPEGs are decoded by TensorFlow at 1/2, 1/4 or 1/8 of their size where that is still large
    enough: less work. Grey and CMYK become RGB. EXIF orientation is not applied, as in TensorFlow's
    and torchvision's pipelines. Pixels pass through. A BMP with a table of colours is refused:
    TensorFlow would take its indices for greys.
    **Raises:** SampleError where the bytes are no whole image; the caller adds where they come
    from.
    """
    import tensorflow as tf

    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 3 or data.shape[2] != channels or 0 in data.shape:
            raise SampleError(
                f"uint8 [h, w, {channels}] is required. Received {data.dtype} {list(data.shape)}"
            )
        return shrink(data, store)
    if not data:
        raise SampleError("the file is empty")
    if data[:2] == b"BM" and _has_colours(data):
        raise SampleError(
            "a BMP of 24 or 32 bits, or of 256 greys, is required; this one has a table of "
            "colours. Convert it"
        )
    try:
        if data[:3] == JPEG:
            ratio = 1
            if store is not None:
                short = int(min(np.asarray(tf.raw_ops.ExtractJpegShape(contents=data))[:2]))
                ratio = next(r for r in (8, 4, 2, 1) if r == 1 or short // r >= store)
            image = tf.raw_ops.DecodeJpeg(contents=data, channels=channels, ratio=ratio)
            full = (image.shape[0], image.shape[1])
            if ratio > 1 and min(full) < store:
                raise AssertionError(
                    f"JPEG of short side {short} decoded at 1/{ratio} to {full}, below {store}"
                )
        else:
            image = tf.io.decode_image(data, channels=channels, expand_animations=False)
    except tf.errors.InvalidArgumentError as error:
        raise SampleError(f"not a whole image ({len(data)} bytes): {error.message}") from error
    return shrink(np.asarray(image), store)
