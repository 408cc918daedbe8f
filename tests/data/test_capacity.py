"""Too little memory: refused before the fill, or as much kept as fits."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from data_helpers import OpenCache

from tfcommx.core import Topology
from tfcommx.data import batches, capacity
from tfcommx.data.options import BatchSpec
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import SlabError, overhead_bytes, prefix
from tfcommx.data.sources.arrays import Arrays
from tfcommx.data.sources.decode import record_bytes
from tfcommx.data.sources.folder import Folder


def test_too_little_memory_refuses_before_the_fill_or_keeps_what_fits(tmp_path, shm):
    images = np.stack([np.full((64, 64, 3), n, np.uint8) for n in range(200)])
    source = Arrays(images, np.arange(200))
    needed = 200 * (64 * 64 * 3 + 64)
    with pytest.raises(
        SlabError,
        match=r"\b200\b.*1,000,000\b.*partial=True",
    ):
        OpenCache(source, shm, memory_bytes=1_000_000)
    assert list(shm.iterdir()) == []
    with OpenCache(source, shm, memory_bytes=needed // 2, partial=True) as cache:
        for epoch in range(2):
            got = [
                (int(image[0, 0, 0]), int(label))
                for images, labels in cache.dataset(BatchSpec(batch=8, dtype="uint8"), epoch)
                for image, label in zip(images.numpy(), labels.numpy(), strict=True)
            ]
            assert sorted(got) == [(n, n) for n in range(200)]
        assert cache.slab.full and 95 < cache.slab.filled < 100
        assert cache.report(1)["overflow"] == 200 - cache.slab.filled
        assert cache.slab.path.stat().st_size <= needed // 2


def test_a_slab_that_another_run_made_too_small_is_refused(shm):
    source = Arrays(np.zeros((200, 64, 64, 3), np.uint8), np.arange(200))
    whole, reads = Topology(1, 1), []
    with OpenCache(source, shm, Topology(4, 1)) as quarter:
        with pytest.raises(
            SlabError,
            match=rf"2,47\d,\d{{3}}\b.*\b200\b.*{quarter.slab.path.name}.*312,896\b.*partial=True",
        ):
            OpenCache(source, shm, whole)
        with OpenCache(source, shm, whole, partial=True) as cache:
            assert cache.slab.length == quarter.slab.length
        source.read, read = lambda sample: (reads.append(sample), read(sample))[1], source.read
        with OpenCache(source, shm, Topology(4, 2), rank=1):
            assert not reads  # as the other processes of a run: it was made for as many
    with (
        OpenCache(source, shm, memory_bytes=2_000_000, partial=True) as small,
        pytest.raises(SlabError, match=rf"{small.slab.path.name}.*\b0\b"),
    ):
        OpenCache(source, shm, whole)


def test_a_run_of_another_seed_is_refused_if_its_part_finds_no_room(shm):
    """It was accepted if it had as many samples; then neither had all of its part in memory."""
    source = Arrays(np.zeros((200, 16, 16, 3), np.uint8), np.arange(200))
    with OpenCache(source, shm, Topology(2, 1)) as first:
        with pytest.raises(
            SlabError, match=rf"83,200\b.*\b100\b.*{first.slab.path.name}.*45,696\b"
        ):
            OpenCache(source, shm, Topology(2, 1), seed=1)
        first.warm()
        # A half exists already and needs no more space
        with OpenCache(source, shm, Topology(2, 1), seed=1) as second:
            second.warm()
            assert not second.slab.full and np.all(second.slab.index[second._part()] > 0)


def test_the_room_for_an_error_of_the_estimate_is_not_reserved(shm, monkeypatch):
    """A cache of validation pictures found no memory beside that of the training.

    The latter had reserved half as much again as it ever used.
    """
    train, other = (
        Arrays(np.full((100, 20, 20, 1), n, np.uint8), np.zeros(100, int)) for n in range(2)
    )
    with OpenCache(train, shm) as first:
        needed = overhead_bytes(100) + 100 * record_bytes(400)
        assert first.slab.length > 1.4 * needed
        assert capacity.reserved_by_others(str(shm)) == needed - first.slab.used_bytes
        with pytest.raises(SlabError, match=r"1,000\b.*51,200\b"):
            OpenCache(other, shm, memory_bytes=1000)
        first.warm()
        assert capacity.reserved_by_others(str(shm)) == 0
    unlimited = SimpleNamespace(f_bavail=0, f_blocks=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: unlimited)
    assert capacity.available_bytes(str(shm), None) > 0  # a tmpfs of size=0
    small = SimpleNamespace(f_bavail=200, f_blocks=800, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    # A full one ends other programs, such as MPI, with a fatal signal
    assert capacity.available_bytes(str(shm), None) == 100 * 4096


@pytest.mark.parametrize("partial", [False, True])
def test_an_estimate_that_is_too_low_leaves_no_sample_out(shm, monkeypatch, partial):
    """With `partial`, as in recipes, the rest was decoded in each epoch beside free memory."""
    monkeypatch.setattr(capacity, "estimate_sample_bytes", lambda *given: 0.75 * record_bytes(1200))
    source = Arrays(np.zeros((100, 20, 20, 3), np.uint8), np.zeros(100, int))
    with OpenCache(source, shm, partial=partial) as cache:
        cache.warm()
        assert cache.slab.filled == 100


@pytest.mark.parametrize("partial", [False, True])
def test_samples_that_overflow_an_estimate_are_served_with_a_warning(shm, monkeypatch, partial):
    """With `partial`, as in recipes, each epoch decoded most pictures again, and nothing said so.

    A slab that is known to be too short, which `partial` asks for, causes none.
    """
    monkeypatch.setattr(capacity, "estimate_sample_bytes", lambda *given: 0.1 * record_bytes(1200))
    source = Arrays(np.zeros((100, 20, 20, 3), np.uint8), np.arange(100))
    batches = BatchSpec(batch=10, dtype="uint8", shuffle=False)
    with OpenCache(source, shm, partial=partial) as cache:
        with pytest.warns(UserWarning, match=r"\.slab\b.*`store`"):
            labels = [label for _, batch in cache.dataset(batches) for label in batch.numpy()]
        assert labels == list(range(100)) and cache.slab.filled < 20
    monkeypatch.undo()
    with OpenCache(source, shm, partial=True, memory_bytes=20_000) as cache:
        list(cache.dataset(batches))
        assert cache.slab.full


def test_a_source_that_cannot_be_reached_is_no_reason_for_a_slab_of_no_room(folder, shm):
    folder.rename(away := folder.with_name("away"))
    away.rename(folder)
    source = Folder(folder)
    folder.rename(away)
    with pytest.raises(SlabError, match=r"\b50\b.*photos\b.*\.jpg: \[Errno 2\]"):
        OpenCache(source, shm, on_error="skip", partial=True)
    away.rename(folder)
    with OpenCache(source, shm) as cache:
        cache.warm()
        assert cache.slab.filled == 50


def test_what_another_run_puts_there_meanwhile_takes_no_room_twice(folder, tmp_path, shm):
    """Two runs at once wrote every sample twice, until the slab was full.

    Then they read from the source in every epoch.
    """
    with (
        OpenCache(folder, shm) as one,
        OpenCache(folder, shm, disk=str(tmp_path / "disk")) as two,
    ):
        samples, absent, epoch = np.arange(50), np.ones(50, np.uint8), np.int64(0)
        files, labels, level = two.filler.read_files(samples, absent)
        one.warm()
        used = one.slab.used_bytes
        remaining = batches.fill(two.slab, files, samples, labels, absent, 3, None, 10**6).numpy()
        assert remaining.tolist() == [batches.FILLED_BY_OTHER] * 50 and two.slab.used_bytes == used
        got, loose, _ = two.filler.finish(samples, absent, remaining, epoch, files, labels, level)
        assert got.tolist() == samples.tolist() and loose.size == 0
        assert (
            two.filler.counts[0] == {"source": 50}
            and len(list((tmp_path / "disk").rglob("*.pack"))) == 0
        )
        one.slab.forget(7)
        read, two.source.read = two.source.read, lambda sample: (one.warm(), read(sample))[1]
        two.filler.fetch(np.array([7]), np.array([1], np.uint8), 0)
        # Once, by the other
        assert two.slab.used_bytes == used + record_bytes(two.slab.get(7)[0].nbytes)
        assert (
            two.slab.put(7, 7 % 3, two.slab.get(7)[0])
            and two.slab.used_bytes == one.slab.used_bytes
        )
        assert len(list((tmp_path / "disk").rglob("*.pack"))) == 0


def test_what_other_slabs_have_reserved_is_not_offered_again(shm):
    size = capacity.available_bytes(str(shm), None) // 2
    slab = Slab(shm / f"{prefix()}a.slab", "k", 1, lambda: size)
    assert capacity.available_bytes(str(shm), None) == pytest.approx(size, rel=0.1)
    # The first made it meanwhile
    assert capacity.available_bytes(str(shm), None, slab.path.stem) == pytest.approx(
        2 * size, rel=0.1
    )
    assert capacity.available_bytes(str(shm), 1000) == 1000
    slab.close()
