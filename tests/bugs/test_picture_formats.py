"""Pictures of formats that TensorFlow reads in part, or not at all."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from tfcommx.data.sources import SampleError
from tfcommx.data.sources.decode import decode

COLOURS = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
PICTURE = Image.fromarray(COLOURS)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def transparent() -> Image.Image:
    image = PICTURE.convert("RGBA")
    image.putalpha(Image.fromarray(np.maximum(COLOURS[..., 0], 1)))
    return image


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exif": b"Exif\0\0" * 9},
        {"save_all": True, "append_images": [Image.new("RGB", PICTURE.size, "red")]},
    ],
    ids=["plain", "with a header", "animated"],
)
@pytest.mark.parametrize("alpha", [False, True])
def test_a_webp_has_the_colours_of_its_first_frame(alpha: bool, options: dict[str, object]) -> None:
    """Transparency and animations were errors: `Number of channels requested does not match`."""
    image = transparent() if alpha else PICTURE
    file = encoded(image, "WEBP", lossless=True, exact=True, **options)
    np.testing.assert_array_equal(decode(file, 3), COLOURS)


@pytest.mark.parametrize("form", ["GIF", "BMP", "WEBP", "PNG", "JPEG"])
def test_every_format_is_decoded_to_greys(form: str) -> None:
    """Records with one channel were refused: `channels must be 0 or 3 for GIF`."""
    options = {"lossless": True} if form == "WEBP" else {}
    smooth = Image.fromarray(np.tile(np.arange(24, dtype=np.uint8) * 10, (16, 1)))
    wanted = np.asarray(smooth).astype(int)
    grey = decode(encoded(smooth.convert("RGB"), form, **options), 1)
    assert grey.shape == (16, 24, 1) and np.abs(grey[..., 0] - wanted).max() < 4


@pytest.mark.parametrize(
    ("file", "start"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "ftypheic"),
        (encoded(PICTURE, "TIFF"), r"II\*"),
        (b"\n<!DOCTYPE html><title>403 Forbidden</title>", "DOCTYPE html"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs"),
        (b"PK\x03\x04" + bytes(30), "PK"),
        (b"text", "text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_another_kind_is_named_by_its_start(file: bytes, start: str) -> None:
    """A download that had failed, or a phone's picture, was `not a whole image`."""
    with pytest.raises(SampleError, match=rf"begins.*{start}"):
        decode(file, 3)


def test_a_bitmap_of_os2_is_decoded() -> None:
    """Its width was read from other bytes: an image of 1,649,306,239,000 pixels."""
    head = struct.pack("<IHHHH", 12, 24, 16, 1, 24)
    pixels = COLOURS[::-1, :, ::-1].tobytes()
    file = b"BM" + struct.pack("<IHHI", 26 + COLOURS.nbytes, 0, 0, 26) + head + pixels
    np.testing.assert_array_equal(decode(file, 3), COLOURS)


@pytest.mark.parametrize("form", ["GIF", "BMP", "WEBP"])
def test_pictures_of_four_channels_have_their_transparency(form: str) -> None:
    """Channels of another number than the file's were errors, and a GIF had three only."""
    file = encoded(transparent(), form, **({"lossless": True} if form == "WEBP" else {}))
    wanted = np.asarray(Image.open(io.BytesIO(file)).convert("RGBA"))
    np.testing.assert_array_equal(decode(file, 4), wanted)
