"""Slabs: sharing, removal, and the memory that is freed."""

import fcntl
import gc
import os
import struct
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import WHOLE, OpenCache, make_folder, served

from tfcommx.core import ConfigurationError, Topology
from tfcommx.data.cache import DataCache
from tfcommx.data.options import BatchSpec
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import SlabError, overhead_bytes, prefix, read_metadata, remove_unused
from tfcommx.data.sources.arrays import Arrays
from tfcommx.data.sources.decode import record_bytes


def test_a_living_slab_is_not_reclaimed_and_other_data_do_not_share_it(folder, tmp_path, shm):
    with (
        OpenCache(folder, shm) as one,
        OpenCache(make_folder(tmp_path / "b", 5), shm) as two,
        OpenCache(folder, shm) as three,
    ):
        assert one.slab.path != two.slab.path
        assert three.slab.path == one.slab.path and not three.slab.created
        assert remove_unused(shm) == []
        with pytest.raises(SlabError, match="another key"):
            Slab(one.slab.path, "another key", 50, lambda: 10**6)
        one.close()
        one.close()
        assert three.slab.path.exists()
        assert len(served(three.dataset(WHOLE))) == 50


def test_runs_that_reshuffle_share_a_slab_with_their_own_processes_only(folder, shm, monkeypatch):
    def name(nodes=2, fraction=0.5, **environment):
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        with OpenCache(folder, shm, Topology(nodes, 1), reshuffle_fraction=fraction) as cache:
            return cache.slab.path.name

    shared = name(fraction=0.0)
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
    with pytest.raises(ConfigurationError, match="HOROVOD_GLOO_RENDEZVOUS_PORT"):
        name(**gloo)
    runs = [name(HOROVOD_GLOO_RENDEZVOUS_PORT=port) for port in ("1", "2", "1")]
    assert len({shared, alone, mpi, *runs}) == 5 and runs[0] == runs[2]


def test_the_last_close_frees_the_memory_though_a_mapping_lives_on(folder, shm):
    with (
        OpenCache(folder, shm) as one,
        OpenCache(folder, shm) as two,
        one.slab.path.open("rb") as file,
    ):
        one.warm()
        one.close()
        assert two.slab.intact(7) and os.fstat(file.fileno()).st_blocks * 512 > 50 * 1000
        two.close()
        assert os.fstat(file.fileno()).st_blocks * 512 == 4096
        assert two.slab.filled == 0 and two.slab.get(7) is None


def test_a_process_that_starts_while_the_last_one_closes_does_not_wait(shm):
    slab = Slab(shm / "tfcommx-a.slab", "k", 1, lambda: 10**5)
    with slab.path.open("rb") as starting:
        slab.close()
        fcntl.flock(starting, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_forked_child_leaves_its_parent_the_slab(shm):
    slab = Slab(shm / "tfcommx-a.slab", "k", 1, lambda: 10**5)
    if (child := os.fork()) == 0:
        slab.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert slab.path.exists() and remove_unused(shm) == []
    slab.close()


def test_pictures_that_are_kept_at_another_size_have_another_slab(folder, shm):
    with OpenCache(folder, shm, store=20) as one, OpenCache(folder, shm, store=30) as two:
        assert one.slab.path != two.slab.path


def test_runs_that_refuse_other_pictures_have_another_slab(folder, shm):
    """The larger pictures of a run were skipped, because another run had refused them."""
    with OpenCache(folder, shm) as one, OpenCache(folder, shm, max_pixels=10**6) as two:
        assert one.slab.path != two.slab.path


def test_a_slab_that_another_process_is_looking_at_is_left_to_it(shm):
    """Also a slab of another boot: two processes removed it at once.

    The second one removed the slab that the first had just made in its place.
    """
    stale = shm / f"{prefix()}old.slab"
    stale.touch(0o600)
    page = bytearray(4096)
    page[:8], text = b"TFCXSLB1", b'{"key": "k", "boot": "another"}'
    page[256 : 256 + len(text)] = text
    stale.write_bytes(page)
    with stale.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert remove_unused(shm) == [] and stale.exists()
    assert remove_unused(shm) == [stale]


@pytest.mark.parametrize("name", ["b" * 5000, "数" * 1000, "\U0001f600" * 1000])
def test_a_long_name_of_a_source_is_shortened_in_the_facts(shm, name):
    with OpenCache(Arrays(np.zeros((1, 2, 2, 3), np.uint8), np.zeros(1), name=name), shm) as cache:
        kept = read_metadata(cache.slab.path)["source"]
        assert len(kept) > 160 and name.endswith(kept)


def test_memory_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(SlabError, match=r"/missing\b.*`memory`"):
        Slab(tmp_path / "missing" / "tfcommx-a.slab", "k", 1, lambda: 10**5)


def test_a_slab_whose_file_was_removed_serves_on_and_a_closed_one_is_not_mistaken(folder, shm):
    with OpenCache(folder, shm) as cache:
        batches = cache.dataset(WHOLE)
        assert len(served(batches)) == 50
        cache.slab.path.unlink()  # as systemd-logind does with RemoveIPC
        assert len(served(batches)) == 50
        number = cache.slab.file
    os.dup2(null := os.open(os.devnull, os.O_RDONLY), number)
    with pytest.raises(tf.errors.FailedPreconditionError, match=rf"/fd/{number}\b"):
        served(batches)
    for file in {null, number}:
        os.close(file)


def test_a_damaged_record_of_another_size_is_unpublished_where_there_is_no_room(shm):
    slab = Slab(shm / "tfcommx-a.slab", "k", 2, lambda: overhead_bytes(2) + 2 * record_bytes(48))
    images = [np.full((4, 4, 3), n, np.uint8) for n in range(2)]
    assert all(slab.put(n, n, image) for n, image in enumerate(images))
    # Bytes and height: legible, and wrong
    struct.pack_into("<qi", slab._map, int(slab.index[1]) + 16, 24, 2)
    assert slab.get(1)[0].shape == (2, 4, 3) and not slab.repair(1, 1, images[1])
    assert slab.get(1) is None and slab.intact(0)
    slab.close()


def test_a_cache_that_nobody_has_any_more_is_freed(shm):
    """TensorFlow keeps the functions that it calls forever."""

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
            memory=shm,
        )
        cache.warm()
        batches = cache.dataset(BatchSpec(batch=4), 0, 2)
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
        end = time.monotonic() + 60
        while held():  # TensorFlow ends an iterator in a separate thread
            assert time.monotonic() < end, [
                os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()
            ]
            time.sleep(0.05)
