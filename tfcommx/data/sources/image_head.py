"""Checks the heads of image files before they are decoded.

A file of some hundred kilobytes can decode to gigabytes, and some files decode without an error to
pixels that are not those of the image.
"""

from __future__ import annotations

import numpy as np

from tfcommx.data.sources.base import SampleError

# How the files of these formats begin.
JPEG, PNG, BMP, GIF = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", (b"GIF87a", b"GIF89a")


def check_head(data: bytes, max_pixels: int) -> None:
    """Refuse a PNG, BMP or GIF that would be too large or decoded to other pixels.

    Args:
        data: the file.
        max_pixels: as in `check_pixels`.

    **Cost:** some bytes; of a GIF a walk over its blocks of 255 bytes.
    **Raises:** SampleError.
    """
    if data.startswith(PNG) and len(data) > 24:
        check_pixels(_big(data, 16), _big(data, 20), max_pixels)
        if data[24] > 8:
            raise SampleError(
                f"a PNG of at most 8 bits a channel is required; this one has {data[24]}, of which "
                "decoding keeps the upper 8. Scale it to 8 bits"
            )
    elif data.startswith(BMP):
        sides = (int.from_bytes(data[at : at + 4], "little", signed=True) for at in (18, 22))
        check_pixels(*map(abs, sides), max_pixels)  # Rows from top to bottom have a height < 0
        _check_bitmap(data)
    elif data.startswith(GIF):
        check_pixels(_gif_pixels(data), 1, max_pixels)


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image with more than `max_pixels` pixels, animations with all their frames."""
    if width * height > max_pixels:
        raise SampleError(
            f"an image of at most {max_pixels:,} pixels is required; this one has "
            f"{width * height:,}. Shrink it, or raise `max_pixels`"
        )


def _check_bitmap(data: bytes) -> None:
    """Refuse a BMP of a kind that TensorFlow decodes as if it were of another.

    It takes indices into a table of colours and run lengths for greys, and ignores masks of bits.

    **Source:** Microsoft, BITMAPINFOHEADER and BITMAPV4HEADER.
    """
    bits, packing = int.from_bytes(data[28:30], "little"), _little(data, 30)
    if bits <= 8 and _has_colours(data):
        raise SampleError(
            "a BMP of 24 or 32 bits, or of 256 greys, is required; this one has a table of "
            "colours. Convert it"
        )
    # Blue, green and red in the order of the bytes; 3: masks say which bits they have.
    masks = tuple(_little(data, at) for at in (54, 58, 62))
    if packing != 0 and (packing, bits, masks) != (3, 32, (0xFF0000, 0xFF00, 0xFF)):
        raise SampleError(
            "a BMP without compression, whose bytes are blue, green and red, is required; this one "
            f"has the compression {packing} with {bits} bits. Convert it"
        )


def _has_colours(bitmap: bytes) -> bool:
    """Return True if a BMP has a colour table that is not a plain ramp of greys."""
    pixels_at, head = _little(bitmap, 10), _little(bitmap, 14)
    table = bitmap[14 + head : max(14 + head, pixels_at)]
    colours = np.frombuffer(table[: len(table) // 4 * 4], np.uint8).reshape(-1, 4)[:, :3]
    if len(colours) > 256:
        return True
    return not np.array_equal(colours, np.arange(len(colours))[:, None].repeat(3, 1))


def _gif_pixels(data: bytes) -> int:
    """Return the pixels of a GIF's frames and its screen: the decoder keeps all of them."""

    def after_table(flags: int, at: int) -> int:
        return at + (3 << (flags % 8 + 1) if flags & 0x80 else 0)

    def after_blocks(at: int) -> int:
        while at < len(data) and data[at]:
            at += 1 + data[at]
        return at + 1

    if len(data) < 13:
        return 0
    pixels = int.from_bytes(data[6:8], "little") * int.from_bytes(data[8:10], "little")
    at = after_table(data[10], 13)
    while at + 10 <= len(data):
        if data[at] == 0x21:  # An extension
            at = after_blocks(at + 2)
        elif data[at] == 0x2C:  # A frame
            sides = data[at + 5 : at + 7], data[at + 7 : at + 9]
            pixels += int.from_bytes(sides[0], "little") * int.from_bytes(sides[1], "little")
            at = after_blocks(after_table(data[at + 9], at + 10) + 1)
        else:
            break
    return pixels


def _big(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def _little(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
