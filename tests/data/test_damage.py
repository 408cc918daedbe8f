"""Damaged and absent files, damaged memory, and the disk level."""

import errno
import os
import warnings
from pathlib import Path

import pytest
import tensorflow as tf
from data_helpers import WHOLE, OpenCache, picture, served
from drawing import case

import tfcommx as cx
from tfcommx.data.disk import Disk, drop, usage
from tfcommx.data.sources.source import SampleError


@pytest.mark.parametrize(
    "damage", [case("truncated", kept=False), "zero-length", case("text", kept=False), "flipped"]
)
def test_a_broken_source_file_is_named_or_skipped(folder, shm, damage):
    path = folder / "class1" / "0004.jpg"
    data = path.read_bytes()
    broken = {
        "truncated": data[: len(data) // 2],
        "zero-length": b"",
        "text": b"<html>not found</html>",
        "flipped": b"\x00" + data[1:],
    }
    path.write_bytes(broken[damage])
    with (
        OpenCache(folder, shm) as cache,
        pytest.raises(tf.errors.OpError, match=r"class1/0004\.jpg.*on_error='skip'"),
    ):
        served(cache.dataset(WHOLE))
    with (
        OpenCache(folder, shm) as cache,
        pytest.raises(SampleError, match=r"class1/0004\.jpg.*on_error='skip'"),
    ):
        cache.warm()
    with OpenCache(folder, shm, on_error="skip") as cache:
        for epoch in range(2):
            assert sorted(served(cache.dataset(WHOLE, epoch))) == [
                (n, n % 3) for n in range(50) if n != 4
            ]
            assert cache.report(epoch)["unreadable"] == 1
        assert "0004.jpg" in next(iter(cache.filler.unreadable.values()))
        (sample,) = cache.filler.unreadable
        assert cache.slab.unreadable(sample)  # so that no process of the node reads it again


def test_a_name_that_is_no_utf_8_is_in_the_message(tmp_path, shm):
    (tmp_path / "h" / "a").mkdir(parents=True)
    Path(os.fsdecode(bytes(tmp_path / "h" / "a") + b"/1\xe9.jpg")).write_bytes(b"bad")
    with (
        OpenCache(tmp_path / "h", shm) as cache,
        pytest.raises(tf.errors.OpError, match=r"1\\udce9\.jpg.*on_error='skip'"),
    ):
        served(cache.dataset(WHOLE))


def test_a_file_that_is_away_is_skipped_and_read_when_it_is_back(folder, shm):
    path = folder / "class1" / "0004.jpg"
    data = path.read_bytes()
    with OpenCache(folder, shm, on_error="skip") as cache:
        path.unlink()
        assert sorted(served(cache.dataset(WHOLE))) == [(n, n % 3) for n in range(50) if n != 4]
        path.write_bytes(data)
        assert sorted(served(cache.dataset(WHOLE, 1))) == [(n, n % 3) for n in range(50)]


def test_a_flipped_byte_in_memory_is_found_and_repaired(folder, shm):
    with OpenCache(folder, shm, verify=1.0) as cache:
        served(cache.dataset(WHOLE))
        for sample, byte in ((3, 64 + 5), (9, 8), (20, 24)):  # a pixel, the label, the height
            cache.slab._map[int(cache.slab.index[sample]) + byte] ^= 0x10
        assert sorted(served(cache.dataset(WHOLE, 1))) == [(n, n % 3) for n in range(50)]
        assert cache.report(1)["repaired"] == 2  # the third had no legible size: it was absent
        assert cache.report(1)["hit_source"] == pytest.approx(3 / 50)
        assert all(cache.slab.intact(i) for i in range(50))
        served(cache.dataset(WHOLE, 2))
        assert cache.report(2)["hit_memory"] == 1


@pytest.mark.parametrize("drop_remainder", [case(True, kept=False), False])
def test_an_epoch_of_unreadable_files_alone_is_refused(folder, shm, drop_remainder):
    """It had batches without samples, on which a model would have trained for nothing."""
    files = sorted(folder.glob("*/*.jpg"))
    for file in files:
        file.write_bytes(b"no picture")
    spec = cx.BatchSpec(7, 16, drop_remainder=drop_remainder)
    with OpenCache(folder, shm, on_error="skip") as cache:
        for _ in range(2):  # The second time the slab knows that they cannot be read
            with pytest.raises(tf.errors.OpError, match=r"jpg.*begins with"):
                list(cache.dataset(spec))
        with pytest.raises(SampleError, match=r"jpg.*begins with"):
            cache.warm()
    files[0].write_bytes(picture(0))
    with OpenCache(folder, shm, on_error="skip") as cache:
        cache.warm()
        assert sum(len(labels) for _, labels in cache.dataset(WHOLE)) == 1


def test_a_batch_of_unreadable_files_alone_has_another_sample(folder, shm):
    """A convolution refused the empty batch, and batch normalization made all weights NaN."""
    for broken in ("class1/0004.jpg", "class0/0009.jpg"):
        (folder / broken).write_bytes(b"no picture")
    spec = cx.BatchSpec(1, 16, dtype="uint8")
    with OpenCache(folder, shm, on_error="skip") as cache, pytest.warns(UserWarning) as caught:
        rows = served(cache.dataset(spec))
        assert len(rows) == 50 and {n for n, _ in rows} == set(range(50)) - {4, 9}
        assert all(label == n % 3 for n, label in rows)
        assert cache.report(0)["unreadable"] == 2
        assert served(cache.dataset(spec, 0)) == rows
    assert sum("place" in str(warning.message) for warning in caught) == 1
    # In an evaluation no sample counts twice.
    exact = cx.BatchSpec(1, 16, dtype="uint8", shuffle=False, drop_remainder=False)
    with OpenCache(folder, shm, on_error="skip") as cache:
        assert len(served(cache.dataset(exact))) == 48


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_damaged_memory_that_cannot_be_repaired_is_not_served(folder, shm, on_error):
    with (
        OpenCache(folder, shm, verify=1.0, on_error=on_error) as cache,
        OpenCache(folder, shm, verify=0.0) as trusting,
    ):
        served(cache.dataset(WHOLE))
        cache.slab._map[int(cache.slab.index[4]) + 64] ^= 0x80
        path = Path(cache.source.where(4))
        path.rename(path.with_suffix(".away"))
        if on_error == "raise":
            with pytest.raises(tf.errors.OpError, match=path.name):
                served(cache.dataset(WHOLE, 1))
        else:
            assert len(served(cache.dataset(WHOLE, 1))) == 49
        with pytest.raises(tf.errors.OpError, match=path.name):
            served(trusting.dataset(WHOLE, 2))


def test_the_disk_level_warms_the_next_run_and_finds_a_flipped_byte(folder, tmp_path, shm):
    disk = tmp_path / "disk"
    with OpenCache(folder, shm, disk=disk) as cache:
        served(cache.dataset(WHOLE))
        assert cache.report(0)["hit_source"] == 1
    pack = next(disk.rglob("*.pack"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    index = next(disk.rglob("*.idx"))
    index.write_bytes(index.read_bytes() + b"half an entry")
    with OpenCache(folder, shm, disk=disk) as cache:
        assert sorted(served(cache.dataset(WHOLE))) == [(n, n % 3) for n in range(50)]
        report = cache.report(0)
        assert report["hit_disk"] == pytest.approx(49 / 50) and report[
            "hit_source"
        ] == pytest.approx(1 / 50)
        assert report["corrupt_disk"] == 1
    assert usage(disk)[0][1] == 51
    assert len(drop(disk)) == 1 and list(disk.iterdir()) == []


def test_a_disk_that_cannot_be_written_warns_once_and_training_goes_on(folder, tmp_path, shm):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder is wanted: root writes to read-only folders")
    with (
        warnings.catch_warnings(record=True) as caught,
        OpenCache(folder, shm, disk=str(blocked)) as cache,
    ):
        warnings.simplefilter("always")
        assert len(served(cache.dataset(WHOLE))) == 50
    assert len([w for w in caught if "takes no more samples" in str(w.message)]) == 1
    full = Disk(tmp_path / "full", "key", 5)
    full._out = (os.open("/dev/full", os.O_RDWR), os.open("/dev/full", os.O_RDWR))
    with pytest.warns(UserWarning, match=r"\[Errno 28\]"):
        full.write(0, 1, b"x")
    full.write(1, 1, b"x")  # and no second warning
    assert full.read(0) is None
    full.close()


@pytest.mark.parametrize("inside", [".", "cache", "class1/cache", "link"])
def test_a_disk_level_among_the_samples_is_refused(folder, shm, inside):
    """Its folder was a class of the next run."""
    (folder.parent / "link").symlink_to(folder)
    disk = folder.parent / "link" if inside == "link" else folder / inside
    with pytest.raises(cx.ConfigurationError, match=r"`disk`.*class"):
        cx.DataCache(folder, memory=shm, disk=disk)
    for outside in (folder.parent / "disk", folder / ".cache"):
        with OpenCache(folder, shm, disk=outside) as cache:
            assert len(served(cache.dataset(WHOLE))) == 50
    with OpenCache(folder, shm) as cache:
        assert len(cache.source.classes) == 3


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_limit_of_the_process_leaves_out_no_sample(folder, shm, code, monkeypatch):
    """With on_error="skip" a process without file descriptors trained on a part of the samples."""

    def refuse(self, sample):
        raise OSError(code, os.strerror(code))

    with OpenCache(folder, shm, on_error="skip") as cache:
        monkeypatch.setattr(type(cache.source), "read", refuse)
        with pytest.raises(tf.errors.OpError, match=r"class\d/\d+\.jpg.*ulimit"):
            served(cache.dataset(WHOLE))
        with pytest.raises(SampleError, match="ulimit"):
            cache.warm()
        monkeypatch.undo()
        assert len(served(cache.dataset(WHOLE, 1))) == 50
