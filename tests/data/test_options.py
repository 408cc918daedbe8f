"""Options of the cache and of batches, and where a cache finds its launch and its source."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from data_helpers import OpenCache

from tfcommx.collectives import process
from tfcommx.collectives.comparisons import Comparisons
from tfcommx.core import ConfigurationError, DataError, Topology
from tfcommx.data.options import BatchSpec, Options
from tfcommx.data.sources.arrays import Arrays


def test_processes_that_the_launcher_has_bound_read_with_all_of_their_processors(
    folder, shm, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for processors, threads in ((6, 1), (24, 6)):
        monkeypatch.setattr(os, "cpu_count", lambda processors=processors: processors)
        with OpenCache(folder, shm, Topology(1, 4)) as cache:
            assert cache.filler._threads == threads


@pytest.mark.parametrize(
    "bad",
    [
        dict(seed=-1),
        dict(seed=2**63),
        dict(verify=2),
        dict(store=0),
        dict(on_error="no"),
        dict(threads=2.5),
    ],
)
def test_bad_options_are_refused(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ConfigurationError, match=rf"\b{name}\b.*{re.escape(str(value))}"):
        Options(**bad)


def test_whole_numbers_of_any_kind_are_taken_and_other_things_named():
    """NumPy's seed was an OverflowError, and a seed of 1.5 was 1.

    A resolution of two numbers was a TypeError that named neither.
    """
    assert repr(Options(seed=np.int64(3), memory_bytes=2e9)) == repr(
        Options(seed=3, memory_bytes=2 * 10**9)
    )
    assert BatchSpec(np.int64(2), 8.0) == BatchSpec(2, 8)
    for kind, bad in (
        (Options, dict(seed=1.5)),
        (BatchSpec, dict(batch=8, resolution=(8, 8))),
        (BatchSpec, dict(batch="8")),
    ):
        with pytest.raises(ConfigurationError, match=f"`{list(bad)[-1]}`"):
            kind(**bad)


def test_a_cache_finds_the_running_launch(shm, monkeypatch):
    """Topology and rank of `init()`; alone without it, unless a launcher started several."""
    monkeypatch.setattr(process, "_current", None)  # Tests before may have called init()
    source = Arrays(np.zeros((40, 4, 4), np.uint8), np.arange(40))
    with OpenCache(source, shm) as cache:
        assert (cache.topology, cache.rank, len(cache.share(0))) == (Topology(1, 1), 0, 40)
    for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    with pytest.raises(ConfigurationError, match=r"init\(\).*\b2\b.*`topology`"):
        OpenCache(source, shm)
    running = SimpleNamespace(topology=Topology(2, 2), rank=3, comparisons=Comparisons())
    monkeypatch.setattr(process, "_current", running)
    with OpenCache(source, shm) as cache:
        assert (cache.topology, cache.rank, len(cache.share(0))) == (Topology(2, 2), 3, 10)
        assert (cache.node, cache.slot) == (1, 1)
    with OpenCache(source, shm, Topology(1, 2), 1) as cache:
        assert (cache.topology, cache.rank) == (Topology(1, 2), 1)


def test_a_cache_takes_a_path(folder, shm):
    for path in (folder, str(folder)):
        with OpenCache(path, shm, store=20) as cache:
            assert cache.source.count == 50 and cache.options.store == 20
    with pytest.raises(DataError, match="/nope"):
        OpenCache("/nope", shm)


def test_an_unknown_option_is_named_with_the_nearest(shm):
    source = Arrays(np.zeros((4, 4, 4), np.uint8), np.arange(4))
    with pytest.raises(ConfigurationError, match=r"'stor'.*'store'"):
        OpenCache(source, shm, stor=20)
