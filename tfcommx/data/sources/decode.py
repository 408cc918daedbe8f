"""Decode images, shrink them to the size at which they are kept, and pack them into records.

A record is one decoded sample as bytes, in a slab and in messages between nodes.

    64 bytes of header: sample, label, bytes, height, width, channels, CRC, zeros | pixels | zeros

Records begin at multiples of 64 bytes. ops/kernels/augment.h reads and writes the same layout.
"""

import io
import re
import struct
import zlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.WebPImagePlugin import WebPImageFile

from tfcommx.data.sources.source import MAX_PIXELS, SampleError
from tfcommx.kernels import loader
from tfcommx.kernels.augment import Window, augment_definition

# First bytes of files that TensorFlow decodes
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# First bytes of files that Pillow decodes -> its class
BY_PILLOW = {b"BM": BmpImageFile, b"GIF8": GifImageFile, b"RIFF": WebPImageFile}


def check_head(data: bytes, max_pixels: int) -> None:
    """Refuse a PNG that is too large or of 16 bits, and a file of a kind that is not read.

    **Raises:** SampleError.
    """
    if data.startswith(PNG) and len(data) > 24:
        width, height = struct.unpack_from(">II", data, 16)
        check_pixels(width, height, max_pixels)
        if data[24] > 8:
            raise SampleError(
                f"a PNG of at most 8 bits a channel is required; this one has {data[24]}, of which "
                "decoding keeps the upper 8. Scale it to 8 bits"
            )
    elif not data.startswith((PNG, JPEG, *BY_PILLOW)):
        # Such as a phone's HEIC, a web page of a failed download, or a pointer of Git LFS
        raise SampleError(
            "a JPEG, PNG, GIF, BMP or WebP is required; this file begins with "
            f"{data[:40]!r}. Convert or replace it"
        )


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image with more than `max_pixels` pixels."""
    if width * height > max_pixels:
        raise SampleError(
            f"an image of at most {max_pixels:,} pixels is required; this one has "
            f"{width * height:,}. Shrink it, or raise `max_pixels`"
        )


# Bytes of the header; the length of each record is a multiple of it
RECORD = 64
# Sample, label, bytes of the pixels, height, width, channels, CRC of these fields and the pixels
HEAD = struct.Struct("<qqqiiiI")


def record_bytes(pixel_bytes: int) -> int:
    """Return the bytes of the record of a sample with `pixel_bytes` bytes of pixels."""
    return RECORD + -(-pixel_bytes // RECORD) * RECORD


def record_head(sample: int, label: int, pixels: np.ndarray) -> bytes:
    """Return the 64 bytes before a sample's pixels (uint8 [h, w, c], contiguous)."""
    # The CRC covers the head, too, because a wrong size or label does as much harm as wrong pixels
    head = struct.pack("<qqqiii", sample, label, pixels.nbytes, *pixels.shape)
    return head + struct.pack("<I24x", zlib.crc32(pixels.data, zlib.crc32(head)))


def pack(sample: int, label: int, pixels: np.ndarray) -> bytes:
    """Return the record of a sample (uint8 [h, w, c]), padded to a multiple of 64 bytes.

    >>> record = pack(7, 1, np.zeros((4, 4, 3), np.uint8))
    >>> len(record)
    128
    >>> sample_of(np.frombuffer(record, np.uint8), 0)
    7
    """
    pixels = np.ascontiguousarray(pixels)
    return b"".join(
        (record_head(sample, label, pixels), pixels.data, bytes(-pixels.nbytes % RECORD))
    )


def unpack(records: np.ndarray, at: int) -> tuple[np.ndarray, int]:
    """Return (pixels uint8 [h, w, c], label) of the record at byte `at` of uint8 [m]."""
    # Viewed in place, because records begin at multiples of 64 bytes
    label, size = records[at + 8 : at + 24].view(np.int64)
    shape = records[at + 24 : at + 36].view(np.int32)
    return records[at + RECORD : at + RECORD + size].reshape(shape), int(label)


def sample_of(records: np.ndarray, at: int) -> int:
    """Return the sample whose record is at byte `at` of uint8 [m]."""
    return int(records[at : at + 8].view(np.int64)[0])


def is_record(records: np.ndarray, at: int) -> bool:
    """Return True if a record is at byte `at` of uint8 [m]; zeros are none."""
    return at + RECORD <= len(records) and bool(records[at + 16 : at + 24].view(np.int64)[0])


def decode(
    data: bytes | np.ndarray, channels: int, store: int | None = None, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """Decode an image to uint8 [h, w, channels], at `stored_size`.

    The format is recognised by the bytes and not by a name. TensorFlow decodes JPEGs and PNGs, as
    the native library does, and JPEGs at 1/2, 1/4 or 1/8 of their size if that is still large
    enough, because that is less work. Pillow decodes GIF, BMP and WebP. Grey and CMYK become RGB,
    transparency is dropped, as by Pillow's `convert("RGB")`, and the first frame of an animation is
    taken. EXIF orientation is not applied, as in TensorFlow's and torchvision's pipelines. Pixels
    that are decoded already are only shrunk. PNGs of 16 bits are refused, because decoding keeps
    the upper 8. Pillow refuses WebPs of more than 178,956,970 pixels, whatever `max_pixels` is.

    Args:
        data: the file, or pixels uint8 [h, w, channels].
        channels: channels of the result: 1, 3 or 4.
        store: short side of the kept images, in pixels; None: their original size.
        max_pixels: as in `Options`.

    **Raises:** SampleError if the bytes are no complete image, or one with more than `max_pixels`
    pixels; the caller adds the origin of the sample.
    """
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 3 or data.shape[2] != channels or 0 in data.shape:
            raise SampleError(
                f"uint8 [h, w, {channels}] is required. Received {data.dtype} {list(data.shape)}"
            )
        return shrink(data, store)
    if not data:
        raise SampleError("the file is empty")
    # A file of some hundred kilobytes can decode to gigabytes, and some files decode without an
    # error to pixels that are not those of the image
    check_head(data, max_pixels)
    return shrink(_decoded(data, channels, store, max_pixels), store)


def _decoded(data: bytes, channels: int, store: int | None, max_pixels: int) -> np.ndarray:
    """Decode a file, a JPEG at the smallest size that is still at least `store`."""
    try:
        for head, plugin in BY_PILLOW.items():
            if data.startswith(head):
                image = _by_pillow(plugin, data, "RGBA" if channels == 4 else "RGB", max_pixels)
                if channels != 1:
                    return image
                grey = tf.round(tf.image.rgb_to_grayscale(tf.cast(image, tf.float32)))
                return np.asarray(tf.cast(grey, tf.uint8))
        if data[:3] != JPEG:
            return np.asarray(tf.io.decode_png(data, channels))
        height, width = np.asarray(tf.raw_ops.ExtractJpegShape(contents=data))[:2].tolist()
        check_pixels(width, height, max_pixels)
        ratio = 1
        if store is not None:
            short = min(height, width)
            ratio = next(r for r in (8, 4, 2, 1) if r == 1 or short // r >= store)
        image = tf.raw_ops.DecodeJpeg(contents=data, channels=channels, ratio=ratio)
        return np.asarray(image)
    except tf.errors.InvalidArgumentError as error:
        # Without the names of TensorFlow's node and operation
        reason = re.sub(r"^\{\{.*?\}\} | \[Op:\w+\]$", "", error.message).rstrip(".")
        raise SampleError(f"not a whole image ({len(data)} bytes): {reason}") from error


def _by_pillow(
    plugin: Callable[[io.BytesIO], ImageFile], data: bytes, mode: str, max_pixels: int
) -> np.ndarray:
    """Decode the first frame of a file with a class of Pillow, to uint8 [h, w, channels]."""
    try:
        # Not by Image.open, whose limit of pixels is one for the whole process
        image = plugin(io.BytesIO(data))
        check_pixels(*image.size, max_pixels)
        # The screen of a GIF may be larger than its first frame
        return np.asarray(image.convert(mode).crop(getattr(image, "dispose_extent", None)))
    except (SampleError, MemoryError):
        raise
    except Exception as error:  # Pillow raises errors of many classes for damaged files
        raise SampleError(f"not a whole image ({len(data)} bytes): {error}") from error


def stored_size(height: int, width: int, store: int | None) -> tuple[int, int]:
    """Return the size of a kept image: its short side has `store` pixels, never more than before.

    >>> stored_size(400, 533, 160)
    (160, 213)
    >>> stored_size(100, 120, 160)
    (100, 120)
    """
    short = min(height, width)
    if store is None or short <= store:
        return height, width
    # Ties go to the even number, as by `lrint` in the native library
    return max(1, round(height * store / short)), max(1, round(width * store / short))


def shrink(image: np.ndarray, store: int | None) -> np.ndarray:
    """Shrink an image, uint8 [h, w, c], to `stored_size`.

    It is halved first, then resized by bilinear interpolation with a factor below 2.
    """
    height, width = image.shape[:2]
    size = stored_size(height, width, store)
    if size == image.shape[:2]:
        return image
    # Halved first, because interpolation by more than 2 would skip pixels
    while min(image.shape[:2]) // 2 >= store:
        image = _halve(image)
    return image if image.shape[:2] == size else resize(image, size)


def _halve(image: np.ndarray) -> np.ndarray:
    """Average 2 x 2 pixels, rounded; an odd last row or column is dropped."""
    even = image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2].astype(np.uint16)
    total = even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]
    # Rounded as in ops/kernels/fill_cpu.cc, because both fill the same slab
    return ((total + 2) >> 2).astype(np.uint8)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an image, uint8 [h, w, c], by bilinear interpolation without antialias."""
    library = loader.library()
    if library is None:
        window = Window(0, 0, *image.shape[:2])
        resized: np.ndarray = augment_definition(image, window, size, "uint8", (), ()).numpy()
        return resized
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
    shrunk: np.ndarray = images[0].numpy()
    return shrunk
