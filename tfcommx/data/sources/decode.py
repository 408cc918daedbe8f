"""Decodes images, and shrinks them to the size at which they are kept."""

from __future__ import annotations

import numpy as np

from tfcommx.data.cache.record import pack
from tfcommx.data.sources.base import SampleError
from tfcommx.kernels import loader
from tfcommx.kernels.augment import Window, augment_definition

# How the files of these formats begin.
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"


def decode(data: bytes | np.ndarray, channels: int, store: int | None = None) -> np.ndarray:
    """Decode an image to uint8 [h, w, channels], at `stored_size`.

    The format (JPEG, PNG, GIF, BMP) is recognised by the bytes and not by a name. JPEGs are decoded
    by TensorFlow at 1/2, 1/4 or 1/8 of their size if that is still large enough: less work. Grey
    and CMYK become RGB. EXIF orientation is not applied, as in TensorFlow's and torchvision's
    pipelines. Pixels pass through. A BMP with a table of colours is refused: TensorFlow would take
    its indices for greys.

    **Raises:** SampleError if the bytes are no whole image; the caller adds where they come from.
    """
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
    return shrink(_decoded(data, channels, store), store)


def _decoded(data: bytes, channels: int, store: int | None) -> np.ndarray:
    """Decode a file, a JPEG at the smallest size that is still at least `store`."""
    import tensorflow as tf

    try:
        if data[:3] != JPEG:
            image = tf.io.decode_image(data, channels=channels, expand_animations=False)
            return np.asarray(image)
        ratio = 1
        if store is not None:
            short = int(min(np.asarray(tf.raw_ops.ExtractJpegShape(contents=data))[:2]))
            ratio = next(r for r in (8, 4, 2, 1) if r == 1 or short // r >= store)
        image = tf.raw_ops.DecodeJpeg(contents=data, channels=channels, ratio=ratio)
        return np.asarray(image)
    except tf.errors.InvalidArgumentError as error:
        raise SampleError(f"not a whole image ({len(data)} bytes): {error.message}") from error


def _has_colours(bitmap: bytes) -> bool:
    """Tell whether a BMP has a colour table that is not a plain ramp of greys.

    **Source:** Microsoft, BITMAPINFOHEADER.
    """
    pixels_at, head, bits = (
        int.from_bytes(bitmap[at : at + size], "little") for at, size in ((10, 4), (14, 4), (28, 2))
    )
    table = bitmap[14 + head : max(14 + head, pixels_at)]
    colours = np.frombuffer(table[: len(table) // 4 * 4], np.uint8).reshape(-1, 4)[:, :3]
    return 0 < bits <= 8 and not np.array_equal(
        colours, np.arange(len(colours))[:, None].repeat(3, 1)
    )


def stored_size(height: int, width: int, store: int | None) -> tuple[int, int]:
    """Return the size at which an image is kept: its short side `store` pixels, never enlarged.

    >>> stored_size(400, 533, 160)
    (160, 213)
    >>> stored_size(100, 120, 160)
    (100, 120)
    """
    short = min(height, width)
    if store is None or short <= store:
        return height, width
    return max(1, round(height * store / short)), max(1, round(width * store / short))


def shrink(image: np.ndarray, store: int | None) -> np.ndarray:
    """Shrink an image, uint8 [h, w, c], to `stored_size`.

    By halvings first, then by bilinear interpolation with a factor below 2.
    """
    size = stored_size(*image.shape[:2], store)
    if size == image.shape[:2]:
        return image
    while min(image.shape[:2]) // 2 >= store:
        image = _halve(image)
    return image if image.shape[:2] == size else resize(image, size)


def _halve(image: np.ndarray) -> np.ndarray:
    """Average 2 x 2 pixels, rounded; an odd last row or column is left out."""
    even = image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2].astype(np.uint16)
    total = even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]
    return ((total + 2) >> 2).astype(np.uint8)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an image, uint8 [h, w, c], by bilinear interpolation without antialias."""
    import tensorflow as tf

    library = loader.library()
    if library is None:
        window = Window(0, 0, *image.shape[:2])
        return augment_definition(image, window, size, "uint8", (), ()).numpy()
    images, _, _ = library.tfcommx_slab_read(
        indices=[0],
        loose=np.frombuffer(pack(0, 0, image), np.uint8),
        loose_at=[0],
        epoch=0,
        size=size,
        T=tf.uint8,
        path="",
        id=0,
        channels=image.shape[2],
        crop="whole",
        flip=False,
    )
    return images[0].numpy()
