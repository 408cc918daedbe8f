"""Decode images, shrink them to the size at which they are kept, and pack them into records.

A record is one decoded sample as bytes, in a slab and in messages between nodes.

    64 bytes of header: sample, label, bytes, height, width, channels, CRC, zeros | pixels | zeros

Records begin at multiples of 64 bytes. ops/kernels/augment.h reads and writes the same layout.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

import numpy as np

from tfcommx.data.sources.source import MAX_PIXELS, SampleError
from tfcommx.kernels import loader
from tfcommx.kernels.augment import Window, augment_definition

# First bytes of files of these formats
JPEG, PNG, BMP, GIF = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", (b"GIF87a", b"GIF89a")
# Kind of a file that is not read -> its first bytes
OTHERS = {
    "a JPEG XL": (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"),
    "a JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    "a TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "a PDF": (b"%PDF-",),
    "a ZIP archive": (b"PK\x03\x04",),
    "a gzip file": (b"\x1f\x8b",),
    "a NumPy array": (b"\x93NUMPY",),
    "an SVG, which has no pixels": (b"<svg",),
    "a web page, as a failed download leaves": (b"<!doctype html", b"<html"),
    "a pointer of Git LFS, whose file `git lfs pull` downloads": (b"version https://git-lfs",),
}
# First byte of an extension and of a frame of a GIF
GIF_EXTENSION, GIF_FRAME = 0x21, 0x2C


def check_head(data: bytes, max_pixels: int) -> None:
    """Refuse a file but a JPEG that is too large or would be decoded to other pixels.

    **Cost:** some bytes; for a GIF a walk over its blocks of 255 bytes.
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
    elif data.startswith(BMP):
        if (head := _little(data, 14)) < 40:
            raise SampleError(
                "a BMP with a header of 40 bytes or more is required; this one, of OS/2, has "
                f"{head}. Convert it"
            )
        width, height = (
            int.from_bytes(data[at : at + 4], "little", signed=True) for at in (18, 22)
        )
        # The height is negative if rows run from top to bottom
        check_pixels(abs(width), abs(height), max_pixels)
        _check_bitmap(data)
    elif data.startswith(GIF):
        check_pixels(_gif_pixels(data), 1, max_pixels)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        check_pixels(*_webp_size(data), max_pixels)
    elif kind := _other_kind(data):
        raise SampleError(
            f"a JPEG, PNG, GIF, BMP or WebP is required; this is {kind}. Convert or replace it"
        )


def _other_kind(data: bytes) -> str | None:
    """Return the kind of a file that is not read, by its first bytes; None if it is unknown."""
    # Files of phones and browsers; the name of the kind follows the length of the first box
    if data[4:8] == b"ftyp" and data[8:10].isalnum():
        return {b"av": "an AVIF", b"he": "a HEIC", b"mi": "a HEIC", b"ms": "a HEIC"}.get(
            data[8:10], "a video or picture in an MPEG-4 file"
        )
    # A web page or an SVG may begin with a byte order mark and blanks
    start = data[:64].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for kind, heads in OTHERS.items():
        if data.startswith(heads) or start.startswith(heads):
            return kind
    return None


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image with more than `max_pixels` pixels, counting all frames of an animation."""
    if width * height > max_pixels:
        raise SampleError(
            f"an image of at most {max_pixels:,} pixels is required; this one has "
            f"{width * height:,}. Shrink it, or raise `max_pixels`"
        )


def _check_bitmap(data: bytes) -> None:
    """Refuse a BMP of a kind that TensorFlow decodes as another kind.

    **Source:** Microsoft, BITMAPINFOHEADER and BITMAPV4HEADER.
    """
    # TensorFlow decodes colour table indices and run lengths as greys, and ignores bit masks
    bits, packing = int.from_bytes(data[28:30], "little"), _little(data, 30)
    if bits <= 8 and _has_colours(data):
        raise SampleError(
            "a BMP of 24 or 32 bits, or of 256 greys, is required; this one has a table of "
            "colours. Convert it"
        )
    # Compression 3 has bit masks; these are for blue, green and red in the order of the bytes
    masks = tuple(_little(data, at) for at in (54, 58, 62))
    if packing != 0 and (packing, bits, masks) != (3, 32, (0xFF0000, 0xFF00, 0xFF)):
        raise SampleError(
            "a BMP without compression, whose bytes are blue, green and red, is required; this one "
            f"has the compression {packing} with {bits} bits. Convert it"
        )


def _has_colours(bitmap: bytes) -> bool:
    """Return True if a BMP has a colour table other than a linear ramp of greys."""
    pixels_at, head = _little(bitmap, 10), _little(bitmap, 14)
    table = bitmap[14 + head : max(14 + head, pixels_at)]
    # A damaged table may end within a colour
    colours = np.frombuffer(table[: len(table) // 4 * 4], np.uint8).reshape(-1, 4)[:, :3]
    if len(colours) > 256:
        return True
    return not np.array_equal(colours, np.arange(len(colours))[:, None].repeat(3, 1))


def _gif_blocks(data: bytes) -> Iterator[int]:
    """Yield the byte offset of each extension and frame of a GIF; stop at damage."""

    def after_table(flags: int, at: int) -> int:
        return at + (3 << (flags % 8 + 1) if flags & 0x80 else 0)

    def after_blocks(at: int) -> int:
        while at < len(data) and data[at]:
            at += 1 + data[at]
        return at + 1

    if len(data) < 13:
        return
    at = after_table(data[10], 13)
    while at + 10 <= len(data) and data[at] in (GIF_EXTENSION, GIF_FRAME):
        yield at
        if data[at] == GIF_EXTENSION:
            at = after_blocks(at + 2)
        else:
            at = after_blocks(after_table(data[at + 9], at + 10) + 1)


def _gif_pixels(data: bytes) -> int:
    """Return the pixels of a GIF's frames and screen, all of which the decoder keeps."""
    corners = [6, *(at + 5 for at in _gif_blocks(data) if data[at] == GIF_FRAME)]
    return sum(_little(data, at, 2) * _little(data, at + 2, 2) for at in corners)


def _with_opaque_frame(data: bytes) -> bytes:
    """Return a GIF whose first frame is opaque, and at the corner of the screen."""
    # TensorFlow decodes transparent pixels as black, and not as the colour that the file has for
    # them, as it does in PNGs and Pillow in both. It cuts a frame that begins elsewhere
    changed = bytearray(data)
    for at in _gif_blocks(data):
        if data[at] == GIF_FRAME:
            changed[at + 1 : at + 5] = bytes(4)
            break
        if data[at + 1] == 0xF9:  # A graphic control extension; its lowest bit: transparency
            changed[at + 3] &= 0xFE
    return bytes(changed)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a WebP; (0, 0) if it has no size.

    **Source:** RFC 9649, sections 2.5 to 2.7.
    """
    kind = data[12:16]
    if kind == b"VP8X":
        return _little(data, 24, 3) + 1, _little(data, 27, 3) + 1
    if kind == b"VP8L":
        bits = _little(data, 21)
        return bits % 2**14 + 1, (bits >> 14) % 2**14 + 1
    if kind == b"VP8 ":
        return _little(data, 26, 2) % 2**14, _little(data, 28, 2) % 2**14
    return 0, 0


def _webp_with_alpha(data: bytes) -> bytes | None:
    """Return a file that TensorFlow decodes to four channels only, such as an animated WebP.

    **Source:** RFC 9649, sections 2.6 and 2.7.
    """
    if not (data.startswith(b"RIFF") and data[8:12] == b"WEBP"):
        return None
    if data[12:16] == b"VP8X" and _little(data, 20, 1) & 0x12:  # Transparency, or an animation
        # TensorFlow refuses an animation that is not marked as transparent
        return data[:20] + bytes([data[20] | 0x10]) + data[21:]
    return data if data[12:16] == b"VP8L" and _little(data, 21) >> 28 & 1 else None


def _little(data: bytes, at: int, size: int = 4) -> int:
    return int.from_bytes(data[at : at + size], "little")


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

    The format (JPEG, PNG, GIF, BMP, WebP) is recognised by the bytes and not by a name. JPEGs are
    decoded by TensorFlow at 1/2, 1/4 or 1/8 of their size if that is still large enough, because
    that is less work. Grey and CMYK become RGB, transparency is dropped, as by Pillow's
    `convert("RGB")`, and the first frame of an animation is taken. EXIF orientation is not applied,
    as in TensorFlow's and torchvision's pipelines. Pixels that are decoded already are only shrunk.
    Files that TensorFlow would decode to other pixels are refused: PNGs of 16 bits, and BMPs with a
    colour table, run lengths or bit masks.

    Args:
        data: the file, or pixels uint8 [h, w, channels].
        channels: channels of the result, in [1, 4].
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
    import tensorflow as tf

    try:
        if data[:3] != JPEG:
            # TensorFlow has no grey decoding for these
            if channels == 1 and not data.startswith(PNG):
                colours = tf.cast(_decoded(data, 3, store, max_pixels), tf.float32)
                grey = tf.round(tf.image.rgb_to_grayscale(colours))
                return np.asarray(tf.cast(grey, tf.uint8))
            if data.startswith(GIF):
                data = _with_opaque_frame(data)
            elif channels == 3 and (webp := _webp_with_alpha(data)) is not None:
                image = tf.io.decode_image(webp, channels=4, expand_animations=False)
                return np.asarray(image[..., :3])
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
        # Without the names of TensorFlow's node and operation
        reason = re.sub(r"^\{\{.*?\}\} | \[Op:\w+\]$", "", error.message).rstrip(".")
        raise SampleError(f"not a whole image ({len(data)} bytes): {reason}") from error


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
    import tensorflow as tf

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
