"""The cache as its users meet it: one and several processes, kills, damage, strange files, full and
read-only disks.
"""

import contextlib
import fcntl
import functools
import gc
import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from launching import ROOT, WORKERS
from PIL import Image

from tfcommx.data.cache import batches, capacity, fill
from tfcommx.data.cache.batches import Phase
from tfcommx.data.cache.cache import DataCache
from tfcommx.data.cache.disk import Disk, drop, usage
from tfcommx.data.cache.options import Options
from tfcommx.data.cache.slab import Slab, SlabError, facts_of, overhead_bytes, reclaim, record_bytes
from tfcommx.data.sources.arrays import Arrays
from tfcommx.data.sources.base import SampleError
from tfcommx.data.sources.folder import Folder
from tfcommx.terms import PlanError, Topology

# in the environment of a test that runs in mounts of its own
OWN_MOUNTS = "TFCOMMX_TEST_OWN_MOUNTS"
_started: list[subprocess.Popen] = []
WHOLE = Phase(batch=7, resolution=16, dtype="uint8", drop_remainder=False)


def colour(number):
    """A colour that survives JPEG and tells the sample's number, below 256."""
    return number % 16 * 16 + 8, number // 16 * 16 + 8, 128


def number(pixel):
    return int(pixel[0]) // 16 + int(pixel[1]) // 16 * 16


def picture(n, size=(40, 30), form="JPEG", mode="RGB", **options):
    out = io.BytesIO()
    Image.new("RGB", size, colour(n)).convert(mode).save(out, form, **options)
    return out.getvalue()


def make_folder(path, count, kinds=3):
    """Class folders whose file n has colour n and class n % kinds; sizes differ."""
    for kind in range(kinds):
        (path / f"class{kind}").mkdir(parents=True)
    for n in range(count):
        (path / f"class{n % kinds}" / f"{n:04}.jpg").write_bytes(
            picture(n, (20 + n % 30, 50 - n % 17))
        )
    return path


def served(dataset):
    """[(number, label)] in the order of service."""
    return [
        (number(image[8, 8]), int(label))
        for images, labels in dataset
        for image, label in zip(images.numpy(), labels.numpy(), strict=True)
    ]


def in_own_mounts(test):
    """Run a test that mounts in a process with mounts of its own, which end with it. No root is
    needed, but user namespaces.
    """

    @functools.wraps(test)
    def outside(request, tmp_path):
        if OWN_MOUNTS in os.environ:
            return test(make_folder(tmp_path / "photos", 50), tmp_path)
        # the second: root, where users may not make namespaces
        for kind in (["--map-root-user"], []):
            alone = ["unshare", *kind, "--mount"]
            if (
                subprocess.run(
                    [*alone, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True
                ).returncode
                == 0
            ):
                break
        else:
            pytest.skip(
                "this test mounts a small tmpfs and a read-only folder: it needs user "
                "namespaces, or root"
            )
        again = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", request.node.nodeid]
        done = subprocess.run(
            [*alone, *again],
            env={**os.environ, OWN_MOUNTS: "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr

    del outside.__wrapped__  # pytest would ask for the arguments of the test inside
    return outside


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "photos", 50)


@pytest.fixture
def shm(tmp_path):
    path = Path("/dev/shm") / f"tfcommx-test-{os.getpid()}-{tmp_path.name}"
    path.mkdir(exist_ok=True)
    yield path
    for process in _started:
        process.kill()
        process.wait()
    _started.clear()
    left = [file.name for file in path.iterdir()]
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert left == [], "a test left a slab behind"


def start(folder, shm, rank=0, nodes=1, slots=1, **asked):
    asked = {
        "folder": str(folder),
        "memory": str(shm),
        "rank": rank,
        "nodes": nodes,
        "slots": slots,
        "batch": 7,
        **asked,
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(WORKERS / "data.py"), json.dumps(asked)]
    pipe = subprocess.PIPE
    _started.append(
        subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
    )
    return _started[-1]


def line(process, key):
    """The process's next message that has `key`."""
    for text in process.stdout:
        if key in (message := json.loads(text)):
            return message
    raise AssertionError(f"the process ended with {process.wait()} before it said {key!r}")


def go(processes):
    """Send each the line that it waits for."""
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


@pytest.mark.parametrize("nodes,slots", [(1, 1), (1, 2), (1, 4), (2, 2)])
def test_every_sample_once_per_epoch_from_one_copy(folder, shm, nodes, slots):
    workers = [
        start(folder, shm, rank, nodes, slots, epochs=2, hold=True) for rank in range(nodes * slots)
    ]
    for worker in workers:
        line(worker, "held")
    assert len(list(shm.iterdir())) == nodes
    go(workers)
    results = [line(worker, "served") for worker in workers]
    go(workers)
    assert [worker.wait(120) for worker in workers] == [0] * len(workers)
    for epoch in range(2):
        got = [
            (number(pixel), label) for result in results for pixel, label in result["served"][epoch]
        ]
        assert sorted(got) == [(n, n % 3) for n in range(50)]
    assert all(result["served"][0] != result["served"][1] for result in results)
    for node in range(nodes):
        assert len({result["filled"] for result in results[node * slots : (node + 1) * slots]}) == 1
    assert sum(result["filled"] for result in results) == 50 * slots
    # each sample is read once; twice only where two processes want it at the same moment
    read = sum(
        report["hit_source"] * report["samples"]
        for result in results
        for report in result["report"]
    )
    assert 50 <= round(read) <= 60


def test_four_processes_share_one_copy_in_memory(tmp_path, shm):
    folder = tmp_path / "large"
    (folder / "a").mkdir(parents=True)
    for n in range(16):
        (folder / "a" / f"{n:02}.png").write_bytes(picture(n, (1000, 700), "PNG"))
    workers = [start(folder, shm, rank, 1, 4, batch=4, hold=True, touch=True) for rank in range(4)]
    for key in ("held", "touched"):
        for worker in workers:
            line(worker, key)
        go(workers)
    results = [line(worker, "served") for worker in workers]
    go(workers)
    assert [worker.wait(120) for worker in workers] == [0] * 4
    one_copy = 16 * 2_100_064
    assert [result["filled"] for result in results] == [16] * 4
    # a sample that two processes fill at once takes its place twice
    assert one_copy <= results[0]["used"] <= one_copy * 1.3
    # from below: every page is counted; from above: once
    assert one_copy <= sum(result["pss"] for result in results) <= results[0]["used"] * 1.02


def test_kill_9_of_one_process_in_the_fill(folder, shm):
    victim = start(folder, shm, 0, 1, 2, pause=0.2, batch=1)
    line(victim, "step")
    other = start(folder, shm, 1, 1, 2, epochs=2, hold=True)
    line(other, "ready")
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    line(other, "held")
    go([other])
    result = line(other, "served")
    go([other])
    assert len(result["served"][0]) == len(result["served"][1]) == 25
    assert all(number(pixel) % 3 == label for epoch in result["served"] for pixel, label in epoch)
    assert other.wait(120) == 0
    assert list(shm.iterdir()) == []  # the survivor was the last


def test_kill_9_of_all_in_training_then_start_again(folder, shm):
    workers = [start(folder, shm, rank, 1, 2, pause=0.1, epochs=20) for rank in range(2)]
    for worker in workers:
        line(worker, "step")
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    stale = next(shm.glob("*.slab"))
    assert facts_of(stale)["pid"] in [worker.pid for worker in workers]
    (shm / "tfcommx-half.1-x.part").write_bytes(b"half made")
    inode = stale.stat().st_ino
    with DataCacheOpen(folder, shm) as cache:
        assert (
            len(cache.reclaimed) == 2
            and cache.slab.created
            and cache.slab.path.stat().st_ino != inode
        )
        assert cache.slab.filled == 0
        assert sorted(served(cache.dataset(WHOLE))) == [(n, n % 3) for n in range(50)]


class DataCacheOpen:
    """A cache in this process that is closed at the end."""

    def __init__(self, folder, shm, topology=None, rank=0, **options):
        source = Folder(folder) if isinstance(folder, Path) else folder
        self.cache = DataCache(source, topology, rank, Options(memory=str(shm), **options))

    def __enter__(self):
        return self.cache

    def __exit__(self, *error):
        self.cache.close()


def test_a_living_slab_is_not_reclaimed_and_other_data_do_not_share_it(folder, tmp_path, shm):
    with (
        DataCacheOpen(folder, shm) as one,
        DataCacheOpen(make_folder(tmp_path / "b", 5), shm) as two,
        DataCacheOpen(folder, shm) as three,
    ):
        assert one.slab.path != two.slab.path
        assert three.slab.path == one.slab.path and not three.slab.created
        assert reclaim(shm) == []
        with pytest.raises(SlabError, match="other contents"):
            Slab(shm, one.slab.path.stem, "another key", 50, lambda: 10**6)
        one.close()
        one.close()
        assert three.slab.path.exists()
        assert len(served(three.dataset(WHOLE))) == 50


def test_runs_that_exchange_share_a_slab_with_their_own_processes_only(folder, shm, monkeypatch):
    def name(nodes=2, exchange=0.5, **environment):
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        with DataCacheOpen(folder, shm, Topology(nodes, 1), exchange=exchange) as cache:
            return cache.slab.path.name

    shared = name(exchange=0.0)
    assert name(nodes=1) == shared  # one node: nothing moves
    alone = name()
    assert alone == name() != shared
    mpi = name(
        OMPI_COMM_WORLD_RANK="0",
        OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_LOCAL_RANK="0",
        PMIX_NAMESPACE="job-1",
    )
    gloo = dict(
        HOROVOD_RANK="0", HOROVOD_SIZE="2", HOROVOD_LOCAL_RANK="0", HOROVOD_GLOO_RENDEZVOUS_ADDR="h"
    )
    with pytest.raises(PlanError, match="HOROVOD_GLOO_RENDEZVOUS_PORT"):
        name(**gloo)
    runs = [name(HOROVOD_GLOO_RENDEZVOUS_PORT=port) for port in ("1", "2", "1")]
    assert len({shared, alone, mpi, *runs}) == 5 and runs[0] == runs[2]


def test_the_last_close_frees_the_memory_though_a_mapping_lives_on(folder, shm):
    with (
        DataCacheOpen(folder, shm) as one,
        DataCacheOpen(folder, shm) as two,
        one.slab.path.open("rb") as file,
    ):
        one.warm()
        one.close()
        assert two.slab.intact(7) and os.fstat(file.fileno()).st_blocks * 512 > 50 * 1000
        two.close()
        assert os.fstat(file.fileno()).st_blocks * 512 == 4096
        assert two.slab.filled == 0 and two.slab.get(7) is None


def test_a_process_that_starts_while_the_last_one_closes_does_not_wait(shm):
    slab = Slab(shm, "tfcommx-a", "k", 1, lambda: 10**5)
    with slab.path.open("rb") as starting:
        slab.close()
        fcntl.flock(starting, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_forked_child_leaves_its_parent_the_slab(shm):
    slab = Slab(shm, "tfcommx-a", "k", 1, lambda: 10**5)
    if (child := os.fork()) == 0:
        slab.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert slab.path.exists() and reclaim(shm) == []
    slab.close()


def test_pictures_that_are_kept_at_another_size_have_another_slab(folder, shm):
    with DataCacheOpen(folder, shm, store=20) as one, DataCacheOpen(folder, shm, store=30) as two:
        assert one.slab.path != two.slab.path


def test_a_slab_that_another_process_is_looking_at_is_left_to_it(shm):
    """Also one of another boot: two that removed it at once removed what the first had
    made anew.
    """
    stale = shm / "tfcommx-old.slab"
    page = bytearray(4096)
    page[:8], text = b"TFCXSLB1", b'{"key": "k", "boot": "another"}'
    page[256 : 256 + len(text)] = text
    stale.write_bytes(page)
    with stale.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert reclaim(shm) == [] and stale.exists()
    assert reclaim(shm) == [stale]


def test_resume_gives_the_batches_of_an_uninterrupted_run(folder, shm):
    phase = Phase(batch=7, resolution=12, crop="random", flip=True)
    with DataCacheOpen(folder, shm, seed=9) as cache:
        whole = [
            (images.numpy(), labels.numpy()) for images, labels in cache.dataset(phase, 1, epochs=2)
        ]
        assert len(whole) == 2 * cache.steps(phase) == 14
    with DataCacheOpen(folder, shm, seed=9) as cache:
        resumed = [
            (images.numpy(), labels.numpy())
            for images, labels in cache.dataset(phase, 1, epochs=2, step=5)
        ]
    assert len(resumed) == 9
    for (images, labels), (again, labels_again) in zip(whole[5:], resumed, strict=True):
        np.testing.assert_array_equal(images, again)
        np.testing.assert_array_equal(labels, labels_again)


def test_an_epoch_that_is_served_again_is_announced(folder, shm):
    """`fit(cache.dataset(phase), epochs=90)` served the same order and the same crops 90 times, and
    said nothing.
    """
    with DataCacheOpen(folder, shm, store=10) as cache:
        with pytest.warns(
            UserWarning,
            match="kept with a short side of store=10 pixels, and enlarged for resolution=16",
        ):
            twice = cache.dataset(WHOLE, 0, 2)
        assert (
            len(twice) == 2 * cache.steps(WHOLE)
            and len(cache.dataset(WHOLE, 0, 2, step=3)) == len(twice) - 3
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            test = cache.dataset(
                Phase(batch=7, resolution=8, dtype="uint8", shuffle=False, drop_remainder=False)
            )
            assert len(list(twice)) == len(twice) and len(list(test)) == len(list(test))
        with pytest.warns(UserWarning, match="Epoch 1 is served again"):
            list(twice)


def test_strange_files_are_read_as_what_they_are(tmp_path, shm):
    folder = tmp_path / "strange"
    (folder / "a").mkdir(parents=True)
    (folder / "b-empty").mkdir()
    (folder / "c-one").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    files = {
        "0-grey.jpg": picture(0, mode="L"),
        "1-cmyk.jpg": picture(1, mode="CMYK"),
        "2-png.jpg": picture(2, form="PNG"),
        "3-exif.jpg": picture(3, (40, 30), exif=exif),
        "4-alpha.png": picture(4, form="PNG", mode="RGBA"),
        "5-pixel.jpg": picture(5, (1, 1)),
        "6-long.jpg": picture(6, (900, 3)),
    }
    for name, data in files.items():
        (folder / "a" / name).write_bytes(data)
    (folder / "c-one" / "7.jpg").write_bytes(picture(7))
    with DataCacheOpen(folder, shm, store=20) as cache:
        assert cache.source.classes == ("a", "b-empty", "c-one")
        got = served(
            cache.dataset(
                Phase(batch=3, resolution=16, dtype="uint8", drop_remainder=False, shuffle=False)
            )
        )
        assert [label for _, label in got] == [0] * 7 + [2]
        assert [n for n, _ in got][1:] == [1, 2, 3, 4, 5, 6, 7]
        shapes = [cache.slab.get(i)[0].shape for i in range(8)]
        assert shapes[3] == (20, 27, 3) and shapes[5] == (1, 1, 3) and shapes[6] == (3, 900, 3)
        grey = cache.slab.get(0)[0]
        assert np.ptp(grey.reshape(-1, 3), axis=1).max() == 0


@pytest.mark.parametrize("damage", ["truncated", "zero-length", "text", "flipped"])
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
        DataCacheOpen(folder, shm) as cache,
        pytest.raises(tf.errors.OpError, match=r"class1/0004\.jpg.*on_error='skip'"),
    ):
        served(cache.dataset(WHOLE))
    with (
        DataCacheOpen(folder, shm) as cache,
        pytest.raises(SampleError, match=r"class1/0004\.jpg.*on_error='skip'"),
    ):
        cache.warm()
    with DataCacheOpen(folder, shm, on_error="skip") as cache:
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
        DataCacheOpen(tmp_path / "h", shm) as cache,
        pytest.raises(tf.errors.OpError, match=r"1\\udce9\.jpg.*on_error='skip'"),
    ):
        served(cache.dataset(WHOLE))


@pytest.mark.parametrize("name", ["b" * 5000, "数" * 1000, "\U0001f600" * 1000])
def test_a_long_name_of_a_source_is_shortened_in_the_facts(shm, name):
    with DataCacheOpen(
        Arrays(np.zeros((1, 2, 2, 3), np.uint8), np.zeros(1), name=name), shm
    ) as cache:
        kept = facts_of(cache.slab.path)["source"]
        assert len(kept) > 160 and name.endswith(kept)


def test_a_file_that_is_away_is_skipped_and_read_when_it_is_back(folder, shm):
    path = folder / "class1" / "0004.jpg"
    data = path.read_bytes()
    with DataCacheOpen(folder, shm, on_error="skip") as cache:
        path.unlink()
        assert sorted(served(cache.dataset(WHOLE))) == [(n, n % 3) for n in range(50) if n != 4]
        path.write_bytes(data)
        assert sorted(served(cache.dataset(WHOLE, 1))) == [(n, n % 3) for n in range(50)]


def test_a_flipped_byte_in_memory_is_found_and_mended(folder, shm):
    with DataCacheOpen(folder, shm, verify=1.0) as cache:
        served(cache.dataset(WHOLE))
        for sample, byte in ((3, 64 + 5), (9, 8), (20, 24)):  # a pixel, the label, the height
            cache.slab._map[int(cache.slab.index[sample]) + byte] ^= 0x10
        assert sorted(served(cache.dataset(WHOLE, 1))) == [(n, n % 3) for n in range(50)]
        assert cache.report(1)["repaired"] == 2  # the third had no legible size: it was absent
        assert cache.report(1)["hit_source"] == pytest.approx(3 / 50)
        assert all(cache.slab.intact(i) for i in range(50))
        served(cache.dataset(WHOLE, 2))
        assert cache.report(2)["hit_memory"] == 1


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_damaged_memory_that_cannot_be_mended_is_not_served(folder, shm, on_error):
    with (
        DataCacheOpen(folder, shm, verify=1.0, on_error=on_error) as cache,
        DataCacheOpen(folder, shm, verify=0.0) as trusting,
    ):
        served(cache.dataset(WHOLE))
        cache.slab._map[int(cache.slab.index[4]) + 64] ^= 0x80
        path = Path(cache.source.where(4))
        path.rename(path.with_suffix(".away"))
        if on_error == "raise":
            with pytest.raises(tf.errors.OpError, match="cannot be read"):
                served(cache.dataset(WHOLE, 1))
        else:
            assert len(served(cache.dataset(WHOLE, 1))) == 49
        with pytest.raises(tf.errors.OpError, match="cannot be read"):
            served(trusting.dataset(WHOLE, 2))


def test_a_damaged_record_of_another_size_is_unpublished_where_there_is_no_room(shm):
    slab = Slab(shm, "tfcommx-a", "k", 2, lambda: overhead_bytes(2) + 2 * record_bytes(48))
    images = [np.full((4, 4, 3), n, np.uint8) for n in range(2)]
    assert all(slab.put(n, n, image) for n, image in enumerate(images))
    # bytes and height: legible, and wrong
    struct.pack_into("<qi", slab._map, int(slab.index[1]) + 16, 24, 2)
    assert slab.get(1)[0].shape == (2, 4, 3) and not slab.repair(1, 1, images[1])
    assert slab.get(1) is None and slab.intact(0)
    slab.close()


def test_the_disk_level_warms_the_next_run_and_finds_a_flipped_byte(folder, tmp_path, shm):
    disk = tmp_path / "disk"
    with DataCacheOpen(folder, shm, disk=str(disk)) as cache:
        served(cache.dataset(WHOLE))
        assert cache.report(0)["hit_source"] == 1
    pack = next(disk.rglob("*.pack"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    index = next(disk.rglob("*.idx"))
    index.write_bytes(index.read_bytes() + b"half an entry")
    with DataCacheOpen(folder, shm, disk=str(disk)) as cache:
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
        DataCacheOpen(folder, shm, disk=str(blocked)) as cache,
    ):
        warnings.simplefilter("always")
        assert len(served(cache.dataset(WHOLE))) == 50
    assert len([w for w in caught if "takes no more samples" in str(w.message)]) == 1
    full = Disk(tmp_path / "full", "key", 5)
    full._out = (os.open("/dev/full", os.O_RDWR), os.open("/dev/full", os.O_RDWR))
    with pytest.warns(UserWarning, match="No space left"):
        full.write(0, 1, b"x")
    full.write(1, 1, b"x")  # and no second warning
    assert full.read(0) is None
    full.close()


def test_too_little_memory_refuses_before_the_fill_or_keeps_what_fits(tmp_path, shm):
    images = np.stack([np.full((64, 64, 3), n, np.uint8) for n in range(200)])
    source = Arrays(images, np.arange(200))
    needed = 200 * (64 * 64 * 3 + 64)
    with pytest.raises(
        SlabError,
        match=r"bytes of memory are required for 200 samples.*offer 1,000,000.*partial=True",
    ):
        DataCacheOpen(source, shm, memory_bytes=1_000_000)
    assert list(shm.iterdir()) == []
    with DataCacheOpen(source, shm, memory_bytes=needed // 2, partial=True) as cache:
        for epoch in range(2):
            got = [
                (int(image[0, 0, 0]), int(label))
                for images, labels in cache.dataset(Phase(batch=8, dtype="uint8"), epoch)
                for image, label in zip(images.numpy(), labels.numpy(), strict=True)
            ]
            assert sorted(got) == [(n, n) for n in range(200)]
        assert cache.slab.full and 95 < cache.slab.filled < 100
        assert cache.report(1)["overflow"] == 200 - cache.slab.filled
        assert cache.slab.path.stat().st_size <= needed // 2


def test_a_slab_that_another_run_made_too_small_is_refused(shm):
    source = Arrays(np.zeros((200, 64, 64, 3), np.uint8), np.arange(200))
    whole, reads = Topology(1, 1), []
    with DataCacheOpen(source, shm, Topology(4, 1)) as quarter:
        with pytest.raises(
            SlabError,
            match=r"About 2,47\d,\d{3} bytes .* 200 samples.*another run made.*offers "
            r"312,896.*partial=True",
        ):
            DataCache(source, whole, 0, Options(memory=str(shm)))
        with DataCacheOpen(source, shm, whole, partial=True) as cache:
            assert cache.slab.length == quarter.slab.length
        source.read, read = lambda sample: (reads.append(sample), read(sample))[1], source.read
        with DataCacheOpen(source, shm, Topology(4, 2), rank=1):
            assert not reads  # as the other processes of a run: it was made for as many
    with (
        DataCacheOpen(source, shm, memory_bytes=2_000_000, partial=True),
        pytest.raises(SlabError, match="another run made"),
    ):
        DataCache(source, whole, 0, Options(memory=str(shm)))


def test_a_run_of_another_seed_is_refused_where_its_part_finds_no_room(shm):
    """It was accepted where it had as many samples; then neither ever had all of its part in
    memory.
    """
    source = Arrays(np.zeros((200, 16, 16, 3), np.uint8), np.arange(200))
    with DataCacheOpen(source, shm, Topology(2, 1)) as first:
        with pytest.raises(
            SlabError, match=r"About 83,200 bytes .* 100 samples.*another run made.*same seed"
        ):
            DataCache(source, Topology(2, 1), 0, Options(memory=str(shm), seed=1))
        first.warm()
        # a half is there, which needs no room
        with DataCacheOpen(source, shm, Topology(2, 1), seed=1) as second:
            second.warm()
            assert not second.slab.full and second.wait_filled(0)


def test_the_room_for_an_error_of_the_estimate_is_not_reserved(shm, monkeypatch):
    """A cache of validation pictures found no memory beside the training's, which was to take a
    half more than it ever did.
    """
    train, other = (
        Arrays(np.full((100, 20, 20, 1), n, np.uint8), np.zeros(100, int)) for n in range(2)
    )
    with DataCacheOpen(train, shm) as first:
        needed = overhead_bytes(100) + 100 * record_bytes(400)
        assert first.slab.length > 1.4 * needed
        assert capacity.reserved_elsewhere(str(shm)) == {
            first.slab.path.name: needed - first.slab.used_bytes
        }
        with pytest.raises(
            SlabError,
            match=f"offer 1,000, beside {first.slab.path.name}, which is still to take 51,200",
        ):
            DataCacheOpen(other, shm, memory_bytes=1000)
        first.warm()
        assert capacity.reserved_elsewhere(str(shm)) == {}
    unlimited = SimpleNamespace(f_bavail=0, f_blocks=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: unlimited)
    assert capacity.offered_bytes(str(shm), None) > 0  # a tmpfs of size=0
    small = SimpleNamespace(f_bavail=200, f_blocks=800, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    # a full one ends other programs, such as MPI, with a fatal signal
    assert capacity.offered_bytes(str(shm), None) == 100 * 4096


def test_a_source_that_cannot_be_reached_is_no_reason_for_a_slab_of_no_room(folder, shm):
    folder.rename(away := folder.with_name("away"))
    away.rename(folder)
    source = Folder(folder)
    folder.rename(away)
    with pytest.raises(
        SlabError, match=r"None of 50 of .*photos can be read; the last: .*\.jpg: .*No such file"
    ):
        DataCacheOpen(source, shm, on_error="skip", partial=True)
    away.rename(folder)
    with DataCacheOpen(source, shm) as cache:
        cache.warm()
        assert cache.slab.filled == 50


def test_what_another_run_puts_there_meanwhile_takes_no_room_twice(folder, tmp_path, shm):
    """Two runs at once wrote every sample twice, until the slab was full and read from the source
    in every epoch.
    """
    with (
        DataCacheOpen(folder, shm) as one,
        DataCacheOpen(folder, shm, disk=str(tmp_path / "disk")) as two,
    ):
        samples, absent, epoch = np.arange(50), np.ones(50, np.uint8), np.int64(0)
        files, labels, level = two.filler.read(samples, absent)
        one.warm()
        used = one.slab.used_bytes
        left = batches.fill(two.slab, files, samples, labels, absent, 3, None).numpy()
        assert left.tolist() == [fill.THERE] * 50 and two.slab.used_bytes == used
        got, loose, _ = two.filler.settle(samples, absent, left, epoch, files, labels, level)
        assert got.tolist() == samples.tolist() and loose.size == 0
        assert (
            two.filler.counts[0] == {"source": 50}
            and len(list((tmp_path / "disk").rglob("*.pack"))) == 0
        )
        one.slab.forget(7)
        read, two.source.read = two.source.read, lambda sample: (one.warm(), read(sample))[1]
        two.filler.fetch(np.array([7]), np.array([1], np.uint8), 0)
        # once, by the other
        assert two.slab.used_bytes == used + record_bytes(two.slab.get(7)[0].nbytes)
        assert (
            two.slab.put(7, 7 % 3, two.slab.get(7)[0])
            and two.slab.used_bytes == one.slab.used_bytes
        )
        assert len(list((tmp_path / "disk").rglob("*.pack"))) == 0


def test_what_other_slabs_have_reserved_is_not_offered_again(shm):
    size = capacity.offered_bytes(str(shm), None) // 2
    slab = Slab(shm, "tfcommx-a", "k", 1, lambda: size)
    assert capacity.offered_bytes(str(shm), None) == pytest.approx(size, rel=0.1)
    # the first made it meanwhile
    assert capacity.offered_bytes(str(shm), None, "tfcommx-a") == pytest.approx(2 * size, rel=0.1)
    assert capacity.offered_bytes(str(shm), 1000) == 1000
    slab.close()


def test_memory_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(SlabError, match=r"Give `memory` a folder"):
        Slab(tmp_path / "missing", "tfcommx-a", "k", 1, lambda: 10**5)


def test_the_end_of_the_process_waits_for_calls_under_way_and_lets_none_begin(monkeypatch):
    """Else TensorFlow's threads may come to a Python that has ended, and the process hangs: now and
    then, after an error.
    """
    monkeypatch.setattr(fill, "_ended", False)
    begun, done = threading.Event(), []
    work = fill.until_exit(lambda: (begun.set(), time.sleep(0.2), done.append(True)))
    threading.Thread(target=work).start()
    assert begun.wait(10)
    fill._end()
    assert done == [True]
    with pytest.raises(RuntimeError, match="process ends"):
        work()


def test_keras_trains_and_the_wait_is_reported(shm):
    import keras

    source = Arrays(
        np.random.default_rng(0).integers(0, 256, (64, 8, 8), np.uint8), np.arange(64) % 4
    )
    with DataCacheOpen(source, shm) as cache:
        phase = Phase(batch=16)
        assert next(iter(cache.dataset(phase)))[0].shape == (16, 8, 8, 1)
        model = keras.Sequential(
            [keras.layers.Flatten(), keras.layers.Dense(4, activation="softmax")]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(
            cache.dataset(phase, 0, epochs=3),
            epochs=3,
            steps_per_epoch=cache.steps(phase),
            verbose=0,
        )
        first, *others = (cache.report(epoch)["samples"] for epoch in range(3))
        # the look above took one batch, or had the next one ready
        assert others == [64, 64] and first in (64 + 16, 64 + 32)
        for _ in cache.dataset(phase, 5):
            time.sleep(0.1)  # a slow consumer does not wait
        quick = cache.report(5)["loader_wait_seconds"]
        fetch, cache.filler.fetch = (
            cache.filler.fetch,
            lambda *args: (time.sleep(0.2), fetch(*args))[1],
        )
        for sample in range(64):
            cache.slab.forget(sample)
        for _ in cache.dataset(phase, 6):
            pass
        assert quick < 0.15 < 0.2 < cache.report(6)["loader_wait_seconds"]


def test_operations_that_must_be_deterministic_cost_the_clock(folder, shm):
    # there is no public way back
    from tensorflow.python.framework.config import disable_op_determinism

    tf.config.experimental.enable_op_determinism()
    try:
        with DataCacheOpen(folder, shm) as cache:
            assert sorted(served(cache.dataset(WHOLE))) == [(n, n % 3) for n in range(50)]
            report = cache.report(0)
            assert report["samples"] == 50 and np.isnan(report["loader_wait_seconds"])
    finally:
        disable_op_determinism()


def test_a_cache_that_nobody_has_any_more_is_freed(shm):
    """TensorFlow keeps the functions that it calls for ever."""

    def held():
        files = [
            path
            for path in Path("/proc/self/fd").iterdir()
            if f"{shm}/tfcommx-" in os.path.realpath(path)
        ]
        return len(files) + Path("/proc/self/maps").read_text().count(f"{shm}/tfcommx-")

    for closes in (True, False):
        cache = DataCache(
            Arrays(np.zeros((20, 4, 4), np.uint8), np.zeros(20, int)),
            options=Options(memory=str(shm)),
        )
        cache.warm()
        batches = cache.dataset(Phase(batch=4), 0, 2)
        source, filler = weakref.ref(cache.source), weakref.ref(cache.filler)
        if closes:
            cache.close()
        del cache
        gc.collect()
        if not closes:
            assert len(list(batches)) == 10  # the dataset has it
        del batches
        gc.collect()
        assert source() is None and filler() is None and list(shm.iterdir()) == []
        end = time.monotonic() + 20
        while held():  # TensorFlow ends an iterator in a thread of its own
            assert time.monotonic() < end, [
                os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()
            ]
            time.sleep(0.05)


def test_a_slab_whose_file_was_removed_serves_on_and_a_closed_one_is_not_mistaken(folder, shm):
    with DataCacheOpen(folder, shm) as cache:
        batches = cache.dataset(WHOLE)
        assert len(served(batches)) == 50
        cache.slab.path.unlink()  # as systemd-logind does with RemoveIPC
        assert len(served(batches)) == 50
        number = cache.slab.file
    os.dup2(null := os.open(os.devnull, os.O_RDONLY), number)
    with pytest.raises(tf.errors.OpError, match="another file is there"):
        served(batches)
    for file in {null, number}:
        os.close(file)


def test_a_dataset_is_not_made_inside_a_function(folder, shm):
    with (
        DataCacheOpen(folder, shm) as cache,
        pytest.raises(PlanError, match=r"outside of tf\.function"),
    ):
        tf.function(lambda: cache.dataset(WHOLE), autograph=False)()


def test_processes_that_the_launcher_has_bound_read_with_all_of_their_processors(
    folder, shm, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for processors, threads in ((6, 1), (24, 6)):
        monkeypatch.setattr(os, "cpu_count", lambda processors=processors: processors)
        with DataCacheOpen(folder, shm, Topology(1, 4)) as cache:
            assert cache.filler._threads == threads


def test_a_forked_child_does_not_wait_for_calls_of_its_parent(monkeypatch):
    monkeypatch.setattr(fill, "_inside", 1)
    if (child := os.fork()) == 0:
        os._exit(fill._inside)
    assert os.waitpid(child, 0)[1] == 0


def test_batches_can_be_sent_ahead_to_a_device(folder, shm):
    """As the README says for a GPU; this machine may have a CPU only, which takes the same way."""
    with DataCacheOpen(folder, shm) as cache:
        ahead = cache.dataset(WHOLE, 0, 2).apply(tf.data.experimental.prefetch_to_device("/cpu:0"))
        assert served(ahead) == served(cache.dataset(WHOLE, 0, 2))


@pytest.mark.parametrize(
    "bad",
    [
        dict(seed=-1),
        dict(seed=2**63),
        dict(verify=2),
        dict(store=0),
        dict(on_error="no"),
        dict(exchange=1.5),
        dict(threads=2.5),
    ],
)
def test_bad_options_are_refused(bad):
    with pytest.raises(PlanError, match=r"Received|Unknown"):
        Options(**bad)


def test_whole_numbers_of_any_kind_are_taken_and_other_things_named():
    """NumPy's seed was an OverflowError, a resolution of two numbers a TypeError that named
    neither, and a seed of 1.5 was 1.
    """
    assert repr(Options(seed=np.int64(3), memory_bytes=2e9)) == repr(
        Options(seed=3, memory_bytes=2 * 10**9)
    )
    assert Phase(np.int64(2), 8.0) == Phase(2, 8)
    for kind, bad in (
        (Options, dict(seed=1.5)),
        (Phase, dict(batch=8, resolution=(8, 8))),
        (Phase, dict(batch="8")),
    ):
        with pytest.raises(
            PlanError, match=rf"`{list(bad)[-1]}` must be a whole number. Received "
        ):
            kind(**bad)


def test_an_epoch_without_a_batch_is_refused(shm):
    with DataCacheOpen(
        Arrays(np.zeros((3, 4, 4), np.uint8), np.zeros(3)), shm, Topology(1, 2), 0
    ) as cache:
        with pytest.raises(PlanError, match="Lower `batch`"):
            cache.dataset(Phase(batch=2))
        assert len(list(cache.dataset(Phase(batch=2, drop_remainder=False)))) == 1


def test_a_rank_without_samples_in_a_step_is_served_an_empty_batch(shm):
    source = Arrays(np.zeros((3, 9, 7, 3), np.uint8), np.arange(3))
    with DataCacheOpen(source, shm, Topology(1, 2), 0) as cache:
        shapes = [
            tuple(images.shape) for images, _ in cache.dataset(Phase(batch=1, drop_remainder=False))
        ]
    assert sorted(shapes) == [(0, 9, 7, 3), (1, 9, 7, 3)]


def test_warm_brings_all_and_another_process_can_wait_for_it(folder, shm):
    with DataCacheOpen(folder, shm) as one, DataCacheOpen(folder, shm) as other:
        assert not other.wait_filled(0.05)
        assert len(list(one.warming())) == one.warming_steps == 1
        assert other.wait_filled(0) and other.slab.filled == 50
        assert sorted(served(other.dataset(WHOLE))) == [(n, n % 3) for n in range(50)]
        assert other.report(0)["hit_memory"] == 1


@in_own_mounts
def test_a_full_tmpfs_keeps_what_fits_and_the_rest_is_read(folder, tmp_path):
    """A real one, of 400 kB: the slab's length is within it, but another file takes the room while
    it fills.
    """
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], check=True)
    # then another process is at its pwrite, and the fill writes through its mapping
    for busy in (False, True):
        with DataCacheOpen(folder, small) as cache, open(cache.slab.path, "r+b") as other:
            if busy:
                fcntl.fcntl(
                    other,
                    fcntl.F_OFD_SETLK,
                    struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 8, 8, 0),
                )
            free = os.statvfs(small)
            (small / "other").write_bytes(bytes(free.f_bavail * free.f_frsize - 100_000))
            for epoch in range(2):
                with (
                    pytest.warns(UserWarning, match="has no room for all samples")
                    if epoch == 0
                    else contextlib.nullcontext()
                ):
                    assert sorted(served(cache.dataset(WHOLE, epoch))) == [
                        (n, n % 3) for n in range(50)
                    ]
            assert cache.slab.full and 5 < cache.slab.filled < 45
            assert cache.report(1)["overflow"] == 50 - cache.slab.filled
            (small / "other").unlink()


@in_own_mounts
def test_a_read_only_disk_serves_what_it_has(folder, tmp_path):
    shm = tmp_path / "memory"
    shm.mkdir()
    disk = tmp_path / "disk"
    disk.mkdir()
    with DataCacheOpen(folder, shm, disk=str(disk)) as cache:
        served(cache.dataset(WHOLE))
    files = sorted(disk.rglob("*.*"))
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
    with DataCacheOpen(folder, shm, disk=str(disk)) as cache:
        served(cache.dataset(WHOLE))
        assert cache.report(0)["hit_disk"] == 1
    make_folder(tmp_path / "other", 5)
    with (
        pytest.warns(UserWarning, match="Read-only file system"),
        DataCacheOpen(tmp_path / "other", shm, disk=str(disk)) as cache,
    ):
        assert len(served(cache.dataset(WHOLE))) == 5
    with pytest.raises(SlabError, match=r"Read-only file system.*Give `memory` a folder"):
        DataCache(Folder(folder), options=Options(memory=str(disk)))
    assert sorted(disk.rglob("*.*")) == files


def test_a_turned_photograph_is_served_as_it_was_stored(tmp_path, shm):
    """EXIF orientation is not applied: torchvision's ImageFolder and TensorFlow's decoder do not
    either.
    """
    photo = np.zeros((32, 32, 3), np.uint8)
    photo[:16] = 255  # the upper half is white; orientation 6 would put it to the right
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a").mkdir()
    Image.fromarray(photo).save(tmp_path / "a" / "turned.jpg", exif=exif)
    with DataCacheOpen(tmp_path, shm) as cache:
        image = next(iter(cache.dataset(Phase(1, dtype="uint8"))))[0][0].numpy()
        assert image[:12].min() > 200 and image[20:].max() < 50
