"""Options of the cache and of batches, and where a cache finds its launch and its source."""

import os
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import OpenCache

from tfcommx.collectives import process
from tfcommx.collectives.comparisons import Comparisons
from tfcommx.core import ConfigurationError, DataError, Topology
from tfcommx.data.cache import DataCache
from tfcommx.data.options import BatchSpec, Options
from tfcommx.data.sources.arrays import Arrays
from tfcommx.data.sources.folder import Folder


def test_processes_that_the_launcher_has_bound_read_with_all_of_their_processors(
    folder, shm, monkeypatch
):
    """Those of a container with a set of processors did too, though they share this set."""
    bound_to = {}

    def bind(_, processors):
        bound_to[threading.get_ident()] = allowed & set(processors)

    def bound(_):
        return bound_to.get(threading.get_ident(), set(range(6)))

    monkeypatch.setattr(os, "sched_getaffinity", bound)
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    for processors, threads in ((6, 1), (24, 6)):
        allowed = set(range(processors))
        with OpenCache(folder, shm, Topology(1, 4)) as cache:
            assert cache.filler._threads == threads
    assert threading.get_ident() not in bound_to, "of this thread, for a moment"


@pytest.mark.parametrize(
    "bad",
    [
        dict(seed=-1),
        dict(seed=2**63),
        dict(verify=2),
        dict(store=0),
        dict(on_error="no"),
        dict(reshuffle_fraction=1.5),
        dict(threads=2.5),
        dict(partial="no"),
    ],
)
def test_bad_options_are_refused(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ConfigurationError, match=rf"\b{name}\b.*{re.escape(str(value))}"):
        Options(**bad)


def test_a_reshuffle_between_unequal_nodes_is_refused_at_the_start(shm):
    """It failed after the first epoch, when samples had already left the slabs."""
    source = Arrays(np.zeros((9, 8, 8, 3), np.uint8), np.zeros(9, int))
    uneven = Topology(2, 2, (("a", 2), ("b", 1)))
    with pytest.raises(ConfigurationError, match=r"reshuffle_fraction.*\ba:2, b:1\b"):
        OpenCache(source, shm, uneven, 0, reshuffle_fraction=0.5)
    with OpenCache(source, shm, uneven, 2) as cache:
        assert len(cache.share(0)) == 3


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


@pytest.mark.parametrize(
    "bad",
    [
        dict(flip="no"),
        dict(shuffle=None),
        dict(drop_remainder=0),
        dict(center="0.875"),
        dict(area=(0.1,)),
        dict(area=(0.1, 0.2, 0.3)),
        dict(aspect=(1, float("inf"))),
    ],
)
def test_bad_settings_of_batches_are_refused(bad):
    """flip="no" mirrored, shuffle=None kept the order, and a third number was ignored."""
    with pytest.raises(ConfigurationError, match=f"`{next(iter(bad))}`"):
        BatchSpec(8, 8, **bad)


@pytest.mark.parametrize("wrong", [None, 5, ["a"], np.zeros((2, 4, 4, 3), np.uint8), "dataset"])
def test_what_is_no_source_is_named(wrong, shm):
    """Each was an AttributeError about `count` or `channels`."""
    if isinstance(wrong, str):  # Not while pytest collects: tests/ranks then set up TensorFlow
        wrong = tf.data.Dataset.range(2)
    with pytest.raises(ConfigurationError, match=type(wrong).__name__):
        DataCache(wrong, memory=shm)


@pytest.mark.parametrize("classes", ["ab", ("a", "a"), ("a", "../b"), ("",)])
def test_classes_are_different_names_of_folders(classes, tmp_path):
    """`classes="ab"` was the classes a and b, and twice the same class had two labels."""
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.jpg").touch()
    with pytest.raises(DataError, match="`classes`"):
        Folder(tmp_path / "photos", classes)


def test_epochs_are_whole_numbers(folder, shm):
    with OpenCache(folder, shm) as cache:
        for wrong in (dict(epochs=1.5), dict(first_epoch="0"), dict(step=None)):
            with pytest.raises(ConfigurationError, match=f"`{next(iter(wrong))}`"):
                cache.dataset(BatchSpec(8, 8), **wrong)


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
