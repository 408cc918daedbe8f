"""The native read-and-augment op equals its definition in plain TensorFlow; the slab beneath."""

import fcntl
import io
import os
import struct

import numpy as np
import pytest
import tensorflow as tf
from drawing import squares
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tfcommx.core import ConfigurationError
from tfcommx.data import batches
from tfcommx.data.options import BatchSpec
from tfcommx.data.slab import Slab
from tfcommx.data.sources.decode import decode, pack, resize
from tfcommx.kernels import loader
from tfcommx.kernels.augment import CropRule, Window, augment_definition, window_of

LIBRARY = loader.library()
assert LIBRARY is not None, loader.REBUILD
SHAPES = [(1, 1), (2, 5), (37, 64), (160, 213), (300, 90), (90, 900)]


def read_loose(
    images, resolution, crop, flip, dtype, epoch=3, seed=5, code="fastest", mean=(), std=()
):
    records = [pack(i, 10 + i, image) for i, image in enumerate(images)]
    at = np.cumsum([0] + [len(record) for record in records])[:-1]
    return LIBRARY.tfcommx_slab_read(
        indices=np.arange(len(images)),
        loose=np.frombuffer(b"".join(records), np.uint8),
        loose_at=at,
        epoch=epoch,
        size=[resolution] * 2,
        T=tf.as_dtype(dtype),
        path="",
        id=0,
        channels=images[0].shape[2],
        crop=crop,
        flip=flip,
        seed=seed,
        code=code,
        mean=mean,
        std=std,
    )


@pytest.mark.parametrize(
    ("dtype", "crop", "channels"),
    squares(["uint8", "float16", "bfloat16", "float32"], ["random", "center", "whole"], [1, 3, 4]),
)
def test_native_equals_definition(dtype, crop, channels):
    rng = np.random.default_rng(channels)
    images = [rng.integers(0, 256, (*shape, channels), np.uint8) for shape in SHAPES * 2]
    mean, std = (0.4, 0.5, 0.3, 0.2)[:channels], (0.25, 0.2, 0.3, 1.0)[:channels]
    rule = CropRule(crop, True, seed=5)
    for resolution in (1, 2, 33, 128):
        got, labels, windows = read_loose(images, resolution, crop, True, dtype, mean=mean, std=std)
        others = [
            read_loose(images, resolution, crop, True, dtype, mean=mean, std=std, code=c)[0]
            for c in ("avx2", "portable")
        ]
        assert labels.numpy().tolist() == [10 + i for i in range(len(images))]
        for other in others:  # whatever the processor has: the same bits
            np.testing.assert_array_equal(got.numpy().view(np.uint8), other.numpy().view(np.uint8))
        for i, image in enumerate(images):
            window = window_of(rule, 3, i, *image.shape[:2])
            assert tuple(windows[i].numpy()) == window
            want = augment_definition(image, window, (resolution, resolution), dtype, mean, std)
            unit = 1.0 if dtype == "uint8" else 1 / 255 / min(std)
            error = np.abs(
                got[i].numpy().astype(np.float64) - want.numpy().astype(np.float64)
            ).max()
            coarse = {"bfloat16": 2.0**-7 * 5, "float16": 2.0**-10 * 5}.get(
                dtype, 0
            )  # one step of the type at the largest value, 5
            assert error <= unit * (1.001 if dtype == "uint8" else 0.25) + coarse, (
                shape := image.shape,
                resolution,
                error,
                shape,
            )
    assert len({int(flip) for flip in windows[:, 4]}) == 2


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 700), st.integers(1, 700))
def test_windows_lie_inside_and_agree(seed, epoch, height, width):
    image = np.zeros((height, width, 1), np.uint8)
    window = Window(*read_loose([image], 4, "random", True, "uint8", epoch, seed)[2][0].numpy())
    assert window == window_of(CropRule("random", True, seed=seed), epoch, 0, height, width)
    assert window.top >= 0 and window.left >= 0 and window.height > 0 and window.width > 0
    assert window.top + window.height <= height and window.left + window.width <= width


def test_random_windows_cover_area_and_aspect():
    windows = [window_of(CropRule("random", True), 0, i, 400, 500) for i in range(500)]
    areas = np.array([w.height * w.width / 200_000 for w in windows])
    aspects = np.array([w.width / w.height for w in windows])
    assert 0.07 < areas.min() < 0.15 and 0.85 < areas.max() <= 1 and 0.4 < areas.mean() < 0.6
    assert 0.74 < aspects.min() < 0.8 and 1.25 < aspects.max() < 1.35
    assert 200 < sum(w.flip for w in windows) < 300
    assert window_of(CropRule("random"), 1, 7, 400, 500) != window_of(
        CropRule("random"), 2, 7, 400, 500
    )


def test_slab_read_refuses_damage(tmp_path):
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    slab = Slab(tmp_path / "tfcommx-a.slab", "k", 3, lambda: 10**6)
    assert slab.put(1, 7, image)
    spec = BatchSpec(batch=1, dtype="uint8")
    none = (np.zeros(0, np.uint8), [-1])
    got, labels, _ = batches.read(slab, [1], *none, 0, spec, 3, 0)
    np.testing.assert_array_equal(got[0], image)
    assert labels.numpy() == [7]
    outside = tf.errors.InvalidArgumentError
    for bad, error in ((2, tf.errors.DataLossError), (3, outside), (-1, outside)):
        with pytest.raises(error, match=rf" {bad}\b"):
            batches.read(slab, [bad], *none, 0, spec, 3, 0)
    with pytest.raises(tf.errors.OpError, match="channels"):
        batches.read(slab, [1], *none, 0, spec, 1, 0)
    slab.index[2] = slab.length - 64  # a damaged index must not read past the end
    slab.index[0] = 12345
    assert batches.check(slab, [0, 1, 2], 0, 1.0, 0).numpy().tolist() == [1, 0, 1]
    for byte in (64, 64 + 47, 8, 37):  # a pixel, the last pixel, the label, the CRC itself
        slab._map[slab.index[1] + byte] ^= 4
        assert batches.check(slab, [1], 0, 1.0, 0).numpy().tolist() == [2]
        assert not slab.intact(1)
        slab._map[slab.index[1] + byte] ^= 4
    assert batches.check(slab, [1], 0, 1.0, 0).numpy().tolist() == [0]
    slab.close()
    assert list(tmp_path.iterdir()) == []


def test_without_library_the_twin_serves_the_same(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    slab = Slab(tmp_path / "tfcommx-a.slab", "k", 8, lambda: 10**6)
    for i in range(6):
        slab.put(i, i, rng.integers(0, 256, (20 + i, 30, 3), np.uint8))
    loose = np.frombuffer(pack(6, 6, rng.integers(0, 256, (9, 9, 3), np.uint8)), np.uint8)
    indices, at = np.arange(7), np.array([-1] * 6 + [0])
    spec = BatchSpec(batch=7, resolution=16, crop="random", flip=True)
    fast = batches.read(slab, indices, loose, at, 2, spec, 3, 1)
    monkeypatch.setattr(loader, "library", lambda: None)
    slow = batches.read(slab, indices, loose, at, 2, spec, 3, 1)
    np.testing.assert_allclose(fast[0], slow[0], atol=0.25 / 255)
    np.testing.assert_array_equal(fast[1], slow[1])
    np.testing.assert_array_equal(fast[2], slow[2])
    slab._map[slab.index[2] + 70] ^= 1
    assert batches.check(slab, np.arange(8), 0, 1.0, 0).numpy().tolist() == [0, 0, 2, 0, 0, 0, 1, 1]
    image = rng.integers(0, 256, (40, 30, 3), np.uint8)
    small = resize(image, (20, 15))
    monkeypatch.undo()
    assert np.abs(small.astype(int) - resize(image, (20, 15))).max() <= 1
    slab.close()


def test_a_mean_of_values_up_to_255_is_refused():
    """It was subtracted from values up to 1, so that all pixels were about the same."""
    with pytest.raises(ConfigurationError, match=r"mean=\(123\.68,\)"):
        BatchSpec(2, mean=(123.68,), std=(58.4,))


def test_a_spec_takes_arrays(tmp_path):
    """Their truth value was needed while TensorFlow traced, which raised an error."""
    spec = BatchSpec(2, mean=np.array([0.5, 0.25]), std=[1, 2], area=np.array([0.5, 1]))
    assert (spec.mean, spec.std, spec.area) == ((0.5, 0.25), (1.0, 2.0), (0.5, 1.0)) and hash(spec)


def hold_pwrite(slab):
    """Take the lock under which a process writes the slab with pwrite; return its file."""
    file = os.open(slab.path, os.O_RDWR)
    fcntl.fcntl(
        file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 8, 8, 0)
    )
    return file


@pytest.mark.parametrize("busy", [False, True])
def test_the_native_fill_puts_what_python_would(tmp_path, busy):
    """`busy`: another process is at its pwrite, so the fill writes through its mapping."""
    rng = np.random.default_rng(0)

    def noise(*shape, dtype=np.uint8):
        return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)

    def written(image, form="PNG", palette=False):
        out = io.BytesIO()
        (Image.fromarray(image).quantize() if palette else Image.fromarray(image)).save(out, form)
        return out.getvalue()

    files = [
        tf.io.encode_jpeg(noise(*size, 3)).numpy()
        for size in [(400, 533), (64, 48), (1, 1), (30, 20)]
    ]
    files += [
        tf.io.encode_jpeg(noise(700, 97, 1)).numpy(),
        tf.io.encode_jpeg(noise(300, 290, 3), progressive=True).numpy(),
    ]
    files += [
        written(noise(64, 80, 3)),
        written(noise(64, 80, 4)),
        written(noise(40, 30)),
        written(noise(40, 30, 3), palette=True),
    ]
    files += [
        tf.io.encode_jpeg(noise(1200, 1000, 3)).numpy(),
        written(noise(100, 97, 3)),
        written(noise(99, 197, 1)[..., 0]),
    ]
    # Images are halved once or twice if they are kept smaller
    files += [tf.io.encode_jpeg(noise(800, 777, 3)).numpy(), written(noise(401, 199, 3))]
    damaged = [
        files[0][: len(files[0]) // 2],
        b"",
        b"\xff\xd8\xff",
        files[6][:20],
        files[6][:-3000],
        written(noise(4, 4, 3), "BMP"),
        tf.io.encode_png(noise(50, 60, 3, dtype=np.uint16)).numpy(),
    ]
    n = len(files) + len(damaged)
    for store in (None, 48):
        slab = Slab(tmp_path / "tfcommx-a.slab", "k", n, lambda: 10**8)
        other = hold_pwrite(slab) if busy else None
        state = np.ones(n, np.uint8)
        state[3] = 0  # said to be there already
        after = batches.fill(
            slab, files + damaged, np.arange(n), np.arange(n) + 5, state, 3, store, 10**7
        ).numpy()
        assert np.flatnonzero(after).tolist() == list(range(len(files), n)) and slab.get(3) is None
        for i in set(range(len(files))) - {3}:
            pixels, label = slab.get(i)
            np.testing.assert_array_equal(pixels, decode(files[i], 3, store))
            assert label == i + 5 and slab.intact(i)  # the CRC is zlib's
        slab.close()
        if busy:
            os.close(other)
    small = Slab(tmp_path / "tfcommx-b.slab", "k", n, lambda: 20_000)
    after = batches.fill(
        small, [files[0], files[1], files[5]], [0, 1, 2], [0, 1, 2], [1, 1, 1], 3, None, 10**6
    ).numpy()
    assert after.tolist() == [1, 0, 1] and small.get(0) is None  # No room except for the small one
    small.close()
