"""Sources besides TFRecords, and the disk level that caches their samples."""

import io
import os
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tfcommx.core import DataError
from tfcommx.data.cache import DataCache
from tfcommx.data.disk import Disk, drop, usage
from tfcommx.data.options import BatchSpec
from tfcommx.data.sources.arrays import Arrays
from tfcommx.data.sources.decode import decode
from tfcommx.data.sources.folder import Folder
from tfcommx.data.sources.source import SampleError


@pytest.fixture
def photos(tmp_path):
    for name in ("a/1.jpg", "a/deep/2.jpg", "b/3.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "photos"


def names(photos):
    source = Folder(photos)
    return [os.path.relpath(source.where(n), photos) for n in range(source.count)]


def test_a_folder_that_cannot_be_listed_is_named(photos, monkeypatch):
    scandir = os.scandir

    def refused(path):  # root may list everything
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=r"photos/a/deep: Permission denied"):
        Folder(photos)


def test_linked_folders_are_followed_but_not_in_circles(photos, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "9.jpg").write_bytes(b"nine")
    (photos / "b" / "link").symlink_to(outside)
    (outside / "back").symlink_to(photos / "b")
    assert names(photos) == ["a/1.jpg", "a/deep/2.jpg", "b/3.jpg", "b/link/9.jpg"]


def test_hidden_folders_and_pipes_are_no_images(photos):
    hidden = photos / "a" / ".thumbs"
    hidden.mkdir()
    (hidden / "4.jpg").write_bytes(b"four")
    os.mkfifo(photos / "b" / "pipe.jpg")
    assert names(photos) == ["a/1.jpg", "a/deep/2.jpg", "b/3.jpg"]


@pytest.mark.parametrize("name", ["a/dead.jpg", "a/folder", "class"])
def test_a_link_to_nowhere_is_named(photos, name):
    (photos / name).symlink_to("/nowhere")
    with pytest.raises(DataError, match=rf"{name}\b.*/nowhere"):
        Folder(photos)


@pytest.mark.parametrize("has_times", [True, False])
def test_folders_of_equal_names_sizes_and_times_have_caches_of_their_own(
    photos, tmp_path, monkeypatch, has_times
):
    """One of them was served the pictures of the other, also in later runs."""
    # Longer than the ends that are read, so that only the times differ
    middle = 100_000 if has_times else 0
    (photos / "b/3.jpg").write_bytes(bytes(2 * middle + 1))
    shutil.copytree(photos, tmp_path / "copy")
    (tmp_path / "copy/b/3.jpg").write_bytes(bytes(middle) + b"x" + bytes(middle))
    for folder in (photos, tmp_path / "copy"):
        for file in folder.rglob("*.jpg"):
            os.utime(file, (0, 0))
        time.sleep(0.02)  # A tick of the file system's clock
    if not has_times:  # As on file systems that keep no times of the inode
        names = ("st_mode", "st_dev", "st_ino", "st_size")
        monkeypatch.setattr(
            "tfcommx.data.sources.folder._facts",
            lambda path: SimpleNamespace(
                **{name: getattr(os.stat(path), name) for name in names},
                st_mtime_ns=0,
                st_ctime_ns=0,
            ),
        )
    key = Folder(photos).key
    assert Folder(tmp_path / "copy").key != key
    (tmp_path / "mount").symlink_to(photos)
    assert Folder(tmp_path / "mount").key == key


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_arrays_of_any_channels_are_served(tmp_path, channels):
    pixels = np.random.default_rng(channels).integers(0, 256, (6, 5, 4, channels), np.uint8)
    cache = DataCache(Arrays(pixels, np.arange(6)), memory=tmp_path)
    try:
        for images, labels in cache.dataset(BatchSpec(batch=3, dtype="uint8")):
            assert np.array_equal(images, pixels[labels])
    finally:
        cache.close()


def test_labels_that_would_be_cut_are_refused():
    pixels = np.zeros((2, 2, 2, 3), np.uint8)
    assert Arrays(pixels, np.array([0.0, 2.0])).labels.tolist() == [0, 2]
    for labels in ([0.0, 0.9], [0.0, np.nan], ["a", "b"]):
        with pytest.raises(DataError, match=str(np.array(labels).dtype)):
            Arrays(pixels, np.array(labels))


@pytest.mark.parametrize("mode", ["P", "1", "L", "RGB"])
def test_a_bitmap_with_a_table_of_colours_has_its_colours(mode):
    """Its indices were served as greys."""
    picture = Image.fromarray(np.array([[[255, 0, 0], [0, 0, 255]]] * 4, np.uint8))
    picture = picture.quantize(4) if mode == "P" else picture.convert(mode)
    out = io.BytesIO()
    picture.save(out, "BMP")
    np.testing.assert_array_equal(decode(out.getvalue(), 3), picture.convert("RGB"))
    for end in (2, 14, 30, 60):
        with pytest.raises(SampleError):
            decode(out.getvalue()[:end], 3)


def test_a_damaged_file_is_named_without_names_of_tensorflow():
    with pytest.raises(SampleError, match=r"\(3 bytes\): Invalid JPEG (?!.*Op:)(?!.*\{\{)"):
        decode(b"\xff\xd8\xff", 3)


@pytest.mark.parametrize("stems", ["ab", "ba"])
def test_a_sample_that_was_written_again_is_read_by_later_runs(tmp_path, monkeypatch, stems):
    for when, stem in enumerate(stems):
        monkeypatch.setattr("tfcommx.data.disk.secrets.token_hex", lambda _, stem=stem: stem)
        disk = Disk(tmp_path, "key", 2)
        assert disk.read(1) is None
        disk.write(1, 5, b"hello")
        disk.close()
        (index,), (pack,) = disk.folder.glob(f"*-{stem}.idx"), disk.folder.glob(f"*-{stem}.pack")
        os.utime(index, (when, when))
        if when == 0:
            pack.write_bytes(b"jello")
    later = Disk(tmp_path, "key", 2)
    assert later.read(1) == (b"hello", 5) and later.corrupt == 0
    later.close()


def test_packs_of_many_runs_are_read_one_by_one(tmp_path):
    """Each pack was held open.

    8 processes and 128 runs that ended early left no descriptor for anything else.
    """
    for sample in range(20):
        disk = Disk(tmp_path, "key", 20)
        disk.write(sample, sample, b"hello")
        disk.close()
    before = len(os.listdir("/proc/self/fd"))
    disk = Disk(tmp_path, "key", 20)
    assert [disk.read(sample) for sample in range(20)] == [
        (b"hello", sample) for sample in range(20)
    ]
    assert len(os.listdir("/proc/self/fd")) == before
    drop(tmp_path)
    assert disk.read(3) is None and disk.corrupt == 0
    disk.close()


def test_a_forked_process_writes_a_pack_of_its_own(tmp_path):
    """It wrote over the samples of its parent, at the same offsets."""
    disk = Disk(tmp_path, "key", 20)
    disk.write(0, 1, b"parent")
    if not (child := os.fork()):
        disk.write(1, 2, b"child!")
        os._exit(0)
    os.waitpid(child, 0)
    disk.write(2, 3, b"again!")
    disk.close()
    later = Disk(tmp_path, "key", 20)
    assert [later.read(n) for n in range(3)] == [(b"parent", 1), (b"child!", 2), (b"again!", 3)]
    assert later.corrupt == 0
    later.close()


def test_two_drops_and_a_writer_at_once(tmp_path, monkeypatch):
    """The second drop ended with a traceback, and so did one beside a run that wrote."""
    disk = Disk(tmp_path, "key", 20)
    disk.write(0, 1, b"first")
    folder, rmtree = disk.folder, shutil.rmtree

    def remove_meanwhile(path, *rest):
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        assert drop(tmp_path) == [path]  # The other one finds it under its new name
        other = Disk(tmp_path, "key", 20)
        other.write(1, 1, b"second")
        other.close()
        rmtree(path, *rest)

    monkeypatch.setattr(shutil, "rmtree", remove_meanwhile)
    drop(tmp_path)
    disk.write(2, 1, b"third")
    disk.close()
    later = Disk(tmp_path, "key", 20)
    assert later.read(1) == (b"second", 1) and later.read(0) is None
    later.close()
    assert drop(tmp_path) == [folder] and list(tmp_path.iterdir()) == []


def test_a_data_set_that_is_dropped_while_it_is_listed(tmp_path, monkeypatch):
    disk = Disk(tmp_path, "key", 20)
    disk.write(0, 1, b"first")
    disk.close()
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda self: os.listdir("/nowhere"))
    assert usage(tmp_path) == [(disk.folder, 0, 0)]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_picture_in_two_classes_is_named(photos, link, recwarn):
    """A data set that removes duplicates by hard links had one picture with both labels."""
    Folder(photos)
    assert not recwarn.list
    link(photos / "a" / "1.jpg", photos / "a" / "9.jpg")  # Twice in one class
    Folder(photos)
    assert not recwarn.list
    link(photos / "a" / "1.jpg", photos / "b" / "8.jpg")
    with pytest.warns(UserWarning, match=r"photos/a/9\.jpg\b.*photos/b/8\.jpg\b.*label"):
        Folder(photos)
