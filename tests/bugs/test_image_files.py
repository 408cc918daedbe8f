"""Images that are passed over, or decoded to other pixels, without a word."""

from __future__ import annotations

import io
import os
import resource
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import warm_ranks
from launching import QUICK
from PIL import Image

import tfcommx as cx
from tfcommx.core import ConfigurationError
from tfcommx.data.sources import Folder, SampleError
from tfcommx.data.sources.decode import decode

PICTURE = Image.fromarray(
    np.stack(np.broadcast_arrays(np.arange(24) * 10, np.arange(16)[:, None] * 15, 99), 2).astype(
        np.uint8
    )
)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def folder(root: Path, *names: str) -> Path:
    forms = {".webp": "WEBP", ".tif": "TIFF", ".png": "PNG", ".bmp": "BMP", ".gif": "GIF"}
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        form = forms.get(Path(name).suffix.lower(), "JPEG")
        (root / name).write_bytes(encoded(Image.new("RGB", (8, 8)), form))
    return root


def count(cache: cx.DataCache) -> int:
    """Return how many samples a cache serves; 0 if it refuses an epoch without any."""
    batches = cache.dataset(cx.BatchSpec(2, 8, dtype="uint8", drop_remainder=False))
    try:
        return sum(len(labels) for _, labels in batches)
    except tf.errors.InvalidArgumentError as error:
        assert "SampleError" in str(error)
        return 0


def names(source: Folder) -> list[str]:
    return [os.path.relpath(source.where(n), source.path) for n in range(source.count)]


# --- folders --------------------------------------------------------------------------------


def test_files_with_other_endings_are_announced(tmp_path: Path) -> None:
    """Two of five cats had other endings, and were left out without a word.

    The thumbnails of a network drive, and the folder that unpacking a Mac's archive leaves, were
    samples and a class.
    """
    mixed = ("cat/1.jpg", "cat/2.webp", "cat/3.TIF", "cat/4.jfif", "cat/5", "dog/1.jpg")
    junk = ("dog/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg", "__MACOSX/cat/._1.jpg")
    with pytest.warns(UserWarning) as caught:
        source = Folder(folder(tmp_path, *mixed, *junk))
    (warning,) = caught
    for words in (
        "3 files",
        "1 .jfif, 1 .tif, 1 no ending",
        "3 images in 2 classes are left: cat, dog",
    ):
        assert words in str(warning.message)
    assert source.classes == ("cat", "dog")
    assert names(source) == ["cat/1.jpg", "cat/2.webp", "dog/1.jpg"]


@pytest.mark.parametrize(
    "junk",
    [
        "__MACOSX/cat/1.jpg",
        "@eaDir/1.jpg",
        "cat/@eaDir/2.jpg/SYNOPHOTO_THUMB_XL.jpg",
        ".ipynb_checkpoints/1-checkpoint.jpg",
        "cat/.ipynb_checkpoints/1-checkpoint.jpg",
        "lost+found/1.jpg",
        "$RECYCLE.BIN/1.jpg",
        "System Volume Information/1.jpg",
        "#recycle/1.jpg",
        "cat/._1.jpg",
        "cat/.DS_Store",
        "cat/Thumbs.db",
        "cat/desktop.ini",
        "dog/__pycache__/1.jpg",
    ],
)
def test_files_that_systems_make_are_no_samples(tmp_path: Path, junk: str) -> None:
    folder(tmp_path, "cat/1.jpg", "dog/2.JPEG", junk)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = Folder(tmp_path)
    assert source.classes == ("cat", "dog") and names(source) == ["cat/1.jpg", "dog/2.JPEG"]


def test_a_class_that_is_asked_for_by_name_is_taken(tmp_path: Path) -> None:
    source = Folder(folder(tmp_path, "@tmp/1.jpg", "cat/1.jpg"), ("@tmp",))
    assert names(source) == ["@tmp/1.jpg"]


def test_images_beside_the_class_folders_are_announced(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"\b1 .*\.png\b"):
        source = Folder(folder(tmp_path, "3.PNG", "cat/1.jpg", "README.txt"))
    assert names(source) == ["cat/1.jpg"]


# --- pixels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("colour", [False, True])
def test_a_png_of_16_bits_is_refused(tmp_path: Path, native: bool, colour: bool) -> None:
    """Of 2,604 shades of a scan of 12 bits, 16 survived: decoding keeps the upper 8 bits."""
    shades = np.random.default_rng(0).integers(0, 4096, (64, 64)).astype(np.uint16)
    if colour:
        file = tf.io.encode_png(np.stack([shades] * 3, 2)).numpy()
    else:
        file = encoded(Image.fromarray(shades), "PNG")
    with pytest.raises(SampleError, match=r"PNG .*\b16\b"):
        decode(file, 3 if colour else 1)
    if native:
        (tmp_path / "scans" / "a").mkdir(parents=True)
        (tmp_path / "scans" / "a" / "1.png").write_bytes(file)
        cache = cx.DataCache(tmp_path / "scans", memory=tmp_path, partial=True)
        try:
            with pytest.raises(tf.errors.OpError, match=r"a/1\.png: .*\b16\b"):
                list(cache.dataset(cx.BatchSpec(1, dtype="uint8")))
        finally:
            cache.close()


def bitmap(bits: int, packing: int, rest: bytes, head: int = 40) -> bytes:
    fields = struct.pack("<IiiHHIIiiII", head, 24, 16, 1, bits, packing, 0, 0, 0, 0, 0)
    at = 54 + (max(12, head - 40) if packing == 3 else 0)
    return struct.pack("<2sIHHI", b"BM", 54 + len(rest), 0, 0, at) + fields + rest


def rows(order: str) -> bytes:
    pixels = np.asarray(PICTURE.convert("RGBA"))[::-1]
    return pixels[..., ["RGBA".index(channel) for channel in order]].tobytes()


def masks(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def test_bitmaps_of_plain_bytes_are_decoded() -> None:
    wanted = np.asarray(PICTURE)
    fields = masks(0xFF0000, 0xFF00, 0xFF)
    for file in (
        bitmap(32, 0, rows("BGRA")),
        bitmap(32, 3, fields + rows("BGRA")),
        bitmap(32, 3, masks(0xFF, 0xFF00, 0xFF0000, 0xFF000000) + rows("RGBA"), head=56),
        bitmap(24, 0, rows("BGR")),
        encoded(PICTURE.convert("RGBA"), "BMP"),
    ):
        np.testing.assert_array_equal(decode(file, 3), wanted)


def test_a_bitmap_of_run_lengths_is_decoded() -> None:
    """Its run lengths were served as greys."""
    grey = PICTURE.convert("L")
    head = bytearray(encoded(grey, "BMP")[: 54 + 4 * 256])
    struct.pack_into("<I", head, 30, 1)
    rows = np.asarray(grey)[::-1]
    packed = b"".join(b"".join(bytes((1, shade)) for shade in row) + b"\0\0" for row in rows)
    wanted = np.asarray(grey.convert("RGB"))
    np.testing.assert_array_equal(decode(bytes(head) + packed + b"\0\1", 3), wanted)


def test_a_bitmap_of_masks_that_pillow_does_not_read_is_refused() -> None:
    """Red and blue were exchanged."""
    with pytest.raises(SampleError, match="BMP"):
        decode(bitmap(32, 3, masks(0xFF, 0xFF00, 0xFF0000) + rows("RGBA")), 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_pngs_of_other_kinds_are_decoded_as_by_pillow(mode: str) -> None:
    image = PICTURE.convert(mode)
    wanted = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode(encoded(image, "PNG"), 3), wanted)


def test_jpegs_of_printers_are_decoded_as_by_pillow() -> None:
    file = encoded(PICTURE.convert("CMYK"), "JPEG", quality=95)
    wanted = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int)
    assert np.abs(decode(file, 3) - wanted).max() < 8


def test_of_an_animation_the_first_frame_is_taken() -> None:
    red = Image.new("RGB", PICTURE.size, "red")
    for form in ("GIF", "PNG"):
        file = encoded(PICTURE, form, save_all=True, append_images=[red])
        wanted = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
        np.testing.assert_array_equal(decode(file, 3), wanted)


def test_a_transparent_gif_has_the_colours_of_its_file() -> None:
    """Its transparent pixels, a white ground as a rule, were black."""
    image = PICTURE.quantize(16)
    for form in ("GIF", "PNG"):
        file = encoded(image, form, transparency=image.getpixel((0, 0)))
        wanted = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
        assert np.any(wanted[0, 0] != 0)
        np.testing.assert_array_equal(decode(file, 3), wanted)


def test_a_gif_whose_frame_is_not_at_the_corner_is_whole() -> None:
    """Of a frame at (4, 4) the last four rows and columns were cut, and the first were black."""
    file = bytearray(encoded(PICTURE, "GIF"))
    wanted = decode(bytes(file), 3)
    struct.pack_into("<HH", file, 6, 64, 64)
    struct.pack_into("<HH", file, file.index(b"\x2c" + bytes(4)) + 1, 4, 4)
    np.testing.assert_array_equal(decode(bytes(file), 3), wanted)


# --- bombs ----------------------------------------------------------------------------------


def png_bomb(side: int) -> bytes:
    """Return a PNG of side * side black pixels, a thousandth of their size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * side)
    data = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def gif_bomb(screen: int, frame: int) -> bytes:
    """Return a GIF that claims a screen, and a frame, of so many pixels a side."""
    file = bytearray(encoded(PICTURE, "GIF"))
    struct.pack_into("<HH", file, 6, screen, screen)
    struct.pack_into("<HH", file, file.index(b"\x2c" + bytes(4)) + 5, frame, frame)
    return bytes(file)


def bmp_bomb() -> bytes:
    """Return a BMP of run lengths that claims 65,500 x 65,500 pixels."""
    file = bytearray(encoded(PICTURE.convert("L"), "BMP"))
    struct.pack_into("<II", file, 18, 65500, 65500)
    struct.pack_into("<I", file, 30, 1)
    return bytes(file)


def webp_bomb() -> bytes:
    """Return a WebP whose canvas has 16,383 x 16,383 pixels."""
    file = bytearray(encoded(PICTURE, "WEBP", exif=b"Exif\0\0" * 9))
    file[24:30] = (16382).to_bytes(3, "little") * 2
    return bytes(file)


def jpeg_bomb() -> bytes:
    """Return a JPEG that claims 65,500 x 65,500 pixels."""
    file = bytearray(encoded(PICTURE, "JPEG"))
    at = file.index(b"\xff\xc0")
    struct.pack_into(">HH", file, at + 5, 65500, 65500)
    return bytes(file)


@pytest.mark.extended
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """A PNG of 410 kB took 1.9 GB."""
    bombs = {
        "a.png": png_bomb(14_000),
        "b.jpg": jpeg_bomb(),
        "c.gif": gif_bomb(65_500, 16),
        "d.bmp": bmp_bomb(),
    }
    # Pillow's own limit, of as many pixels, comes first
    for bomb in (gif_bomb(16, 65_500), webp_bomb()):
        with pytest.raises(SampleError, match=r"\b178956970 pixels"):
            decode(bomb, 3)
    (tmp_path / "p" / "a").mkdir(parents=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, file in bombs.items():
        (tmp_path / "p" / "a" / name).write_bytes(file)
        assert len(file) < 10**6
        with pytest.raises(SampleError, match=r"178,956,970 .*`max_pixels`"):
            decode(file, 3)
    cache = cx.DataCache(tmp_path / "p", memory=tmp_path, on_error="skip")
    try:
        assert count(cache) == 0
        assert all("`max_pixels`" in words for words in cache.filler.unreadable.values())
    finally:
        cache.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_user_with_larger_images_can_allow_them(tmp_path: Path) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    for name, form in (
        ("1.png", "PNG"),
        ("2.jpg", "JPEG"),
        ("3.gif", "GIF"),
        ("4.bmp", "BMP"),
    ):
        (tmp_path / "p" / "a" / name).write_bytes(encoded(PICTURE, form))
    for allowed, served in ((383, 0), (384, 4)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = cx.DataCache(
                tmp_path / "p", memory=tmp_path, on_error="skip", max_pixels=allowed
            )
        try:
            assert count(cache) == served
        finally:
            cache.close()
    with pytest.raises(ConfigurationError, match="`max_pixels`"):
        cx.DataCache(tmp_path / "p", memory=tmp_path, max_pixels=0)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, b"VP8 "), ({"lossless": True}, b"VP8L"), ({"exif": b"Exif\0\0" * 9}, b"VP8X")],
)
def test_a_webp_has_as_many_pixels(options: dict[str, object], kind: bytes) -> None:
    """A WebP with another ending, or in a TFRecord, was decoded whatever its size."""
    file = encoded(PICTURE, "WEBP", **options)
    assert file[12:16] == kind
    assert decode(file, 3, max_pixels=384).shape == (PICTURE.height, PICTURE.width, 3)
    with pytest.raises(SampleError, match=r"\b383 .*\b384\b"):
        decode(file, 3, max_pixels=383)


@pytest.mark.parametrize("head", [b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"])
def test_a_jpeg_xl_whose_size_is_unknown_is_refused(head: bytes) -> None:
    with pytest.raises(SampleError, match="begins with"):
        decode(head + bytes(100), 3)


def test_a_bitmap_from_top_to_bottom_has_as_many_pixels() -> None:
    bitmap = bytearray(encoded(PICTURE, "BMP"))
    height = int.from_bytes(bitmap[22:26], "little", signed=True)
    bitmap[22:26] = (-height).to_bytes(4, "little", signed=True)
    assert decode(bytes(bitmap), 3, max_pixels=384).shape == (PICTURE.height, PICTURE.width, 3)
    with pytest.raises(SampleError, match=r"\b383 .*\b384\b"):
        decode(bytes(bitmap), 3, max_pixels=383)


def test_the_head_of_a_jpeg_is_read_as_its_decoder_reads_it(tmp_path: Path) -> None:
    """A marker without a length, taken for one with, hid the true size from the native fill."""
    file = encoded(PICTURE, "JPEG")
    hidden = file[:2] + b"\xff\x01" + file[2:]
    # Where the two bytes after that marker lead as a length: a frame of 8 x 8 pixels.
    hidden = hidden.ljust(4 + int.from_bytes(file[2:4], "big"), b"\0")
    hidden += bytes.fromhex("ffc0000b080008000801011100")
    (tmp_path / "p" / "a").mkdir(parents=True)
    (tmp_path / "p" / "a" / "1.jpg").write_bytes(hidden)
    for allowed in (100, 384):
        cache = cx.DataCache(tmp_path / "p", memory=tmp_path, on_error="skip", max_pixels=allowed)
        try:
            assert count(cache) == (allowed == 384)
        finally:
            cache.close()


def test_the_program_prints_its_classes(tmp_path: Path) -> None:
    """A class too many, or half of the pictures, is seen before the training and not after it."""
    code = (
        "import sys; from pathlib import Path; from tfcommx.recipes.families import DataRank\n"
        "from tfcommx.recipes.datasets import DATASETS; from tfcommx.core import Topology\n"
        "data = DATASETS['folder'](folder=sys.argv[1], memory=sys.argv[1])\n"
        "for rank in 0, 1: data.build(DataRank(Topology(1, 2), rank)).close()\n"
    )
    folder(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "test/cat/3.jpg", "test/dog/4.jpg")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(alone=True)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if "pictures in" in line]
    assert lines == [
        f"{tmp_path / split}: 2 pictures in 2 classes: cat, dog" for split in ("train", "test")
    ]
