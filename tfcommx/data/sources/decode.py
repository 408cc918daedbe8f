"""Decodes images, and shrinks them to the size at which they are kept."""

from __future__ import annotations

import numpy as np

from tfcommx.data.cache.record import pack
from tfcommx.data.sources.base import MAX_PIXELS, SampleError
from tfcommx.data.sources.image_head import JPEG, check_head, check_pixels
from tfcommx.kernels import loader
from tfcommx.kernels.augment import Window, augment_definition


def decode(
    data: bytes | np.ndarray,
    channels: int,
    store: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode an image to uint8 [h, w, channels], at `stored_size`.

    The format (JPEG, PNG, GIF, BMP) is recognised by the bytes and not by a name. JPEGs are decoded
    by TensorFlow at 1/2, 1/4 or 1/8 of their size if that is still large enough: less work. Grey
    and CMYK become RGB, transparency is dropped, and of an animation the first frame is taken.
    EXIF orientation is not applied, as in TensorFlow's and torchvision's pipelines. Pixels pass
    through. Files that TensorFlow would decode to other pixels are refused: PNGs of 16 bits, and
    BMPs with a table of colours, run lengths or masks.

    Args:
        data: the file, or pixels uint8 [h, w, channels].
        channels: of the result, in [1, 4].
        store: short side at which images are kept, pixels; None: their own size.
        max_pixels: as in `Options`.

    **Raises:** SampleError if the bytes are no whole image, or one with more than `max_pixels`
    pixels; the caller adds where they come from.
    """
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 3 or data.shape[2] != channels or 0 in data.shape:
            raise SampleError(
                f"uint8 [h, w, {channels}] is required. Received {data.dtype} {list(data.shape)}"
            )
        return shrink(data, store)
    if not data:
        raise SampleError("the file is empty")
    check_head(data, max_pixels)
    return shrink(_decoded(data, channels, store, max_pixels), store)


def _decoded(data: bytes, channels: int, store: int | None, max_pixels: int) -> np.ndarray:
    """Decode a file, a JPEG at the smallest size that is still at least `store`."""
    import tensorflow as tf

    try:
        if data[:3] != JPEG:
            image = tf.io.decode_image(data, channels=channels, expand_animations=False)
            return np.asarray(image)
        height, width = np.asarray(tf.raw_ops.ExtractJpegShape(contents=data))[:2].tolist()
        check_pixels(width, height, max_pixels)
        ratio = 1
        if store is not None:
            short = min(height, width)
            ratio = next(r for r in (8, 4, 2, 1) if r == 1 or short // r >= store)
        image = tf.raw_ops.DecodeJpeg(contents=data, channels=channels, ratio=ratio)
        return np.asarray(image)
    except tf.errors.InvalidArgumentError as error:
        raise SampleError(f"not a whole image ({len(data)} bytes): {error.message}") from error


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
