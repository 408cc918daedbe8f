"""Data that differ between nodes are refused on every rank, and the difference is named.

Seen: one node's copy of a folder lacked an empty class, as copies by way of a bucket do. Its labels
were shifted, so the ranks learnt different labels for the same pictures, without a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from PIL import Image

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.collectives.comm import Comm
from tfcommx.data.sources.arrays import Arrays
from tfcommx.data.sources.folder import Folder
from tfcommx.data.sources.tfrecord import ImageFeatures, TFRecords
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.run import prepare

CLASSES = ("ant", "bee", "cat")


def pictures(top: Path, files: dict[str, int], level: int = 60) -> Path:
    """Write class folders with so many grey pictures each."""
    for kind, count in files.items():
        (top / kind).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (level,) * 3).save(top / kind / f"{number}.png")
    return top


def a_class_is_missing(top: Path, differs: bool) -> Folder:
    files = {"ant": 4, "bee": 0, "cat": 4}
    if differs:
        del files["bee"]
    return Folder(pictures(top, files))


def a_copy_is_incomplete(top: Path, differs: bool) -> Folder:
    return Folder(pictures(top, {"ant": 4, "bee": 5 - differs, "cat": 4 + differs}))


def a_file_has_another_size(top: Path, differs: bool) -> Folder:
    pictures(top, {"ant": 4, "bee": 4})
    if differs:
        Image.new("RGB", (9, 8)).save(top / "bee" / "2.png")
    return Folder(top)


def a_file_has_another_name(top: Path, differs: bool) -> Folder:
    pictures(top, {"ant": 4, "bee": 4})
    if differs:
        (top / "bee" / "2.png").rename(top / "bee" / "x.png")
    return Folder(top)


def shards(top: Path, records: tuple[int, ...]) -> TFRecords:
    files = []
    for number, count in enumerate(records):
        files.append(top / f"train-{number}.tfrecord")
        with tf.io.TFRecordWriter(str(files[-1])) as file:
            for _ in range(count):
                file.write(b"a record")
    return TFRecords(files, ImageFeatures(classes=CLASSES))


def a_shard_has_other_records(top: Path, differs: bool) -> TFRecords:
    return shards(top, (4, 6, 6) if differs else (4, 8, 4))


def arrays_are_in_another_order(_: Path, differs: bool) -> Arrays:
    images, labels = np.zeros((9, 4, 4), np.uint8), np.arange(9) % 3
    return Arrays(images, labels[::-1] if differs else labels, CLASSES)


def classes_are_in_another_order(_: Path, differs: bool) -> Arrays:
    names = ("bee", "ant", "cat") if differs else CLASSES
    return Arrays(np.zeros((9, 4, 4), np.uint8), np.arange(9) % 3, names)


def refused_everywhere(comm: Comm, work: Callable[[], Any]) -> str:
    """Return the message with which `work` is refused, the same on every rank."""
    with pytest.raises(cx.ConfigurationError) as caught:
        work()
    assert comm.gather_objects(str(caught.value)) == [str(caught.value)] * comm.topology.size
    return str(caught.value)


def last(comm: Comm) -> bool:
    return comm.rank == comm.topology.size - 1


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (a_class_is_missing, "class 'bee': 0 files (e3b0c442) on rank 0, missing on rank 1"),
        case(a_copy_is_incomplete, "class 'bee': 5 files", kept=False),
        (a_file_has_another_size, "class 'bee': 4 files"),
        case(a_file_has_another_name, "class 'bee': 4 files", kept=False),
        (a_shard_has_other_records, "2. file: train-1.tfrecord, 8 records"),
        (arrays_are_in_another_order, "images and labels: uint8 [9, 4, 4, 1]"),
        (classes_are_in_another_order, "label 0: ant on rank 0, bee on rank 1"),
    ],
)
def test_a_copy_of_the_data_that_differs_is_refused(
    comm: Comm, tmp_path: Path, make: Callable[[Path, bool], Any], named: str
) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    cache = cx.DataCache(make(tmp_path, last(comm)), memory=tmp_path)
    said = refused_everywhere(comm, lambda: comm.gather_objects(None))
    assert named in said and "samples: " not in said and f"on rank {comm.topology.size - 1}" in said
    assert comm.gather_objects(1) == [1] * comm.topology.size  # Said once
    cache.close()


def test_equal_copies_made_at_other_times_are_no_difference(comm: Comm, tmp_path: Path) -> None:
    cache = cx.DataCache(a_class_is_missing(tmp_path / f"{comm.rank}", False), memory=tmp_path)
    assert comm.gather_objects(cache.rank) == list(range(comm.topology.size))
    assert not comm.comparisons.digests() or comm.topology.size == 1
    cache.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 5}, "option seed: 0"),
        case({"store": 5}, "option store: None on rank 0, 5 on rank 1", kept=False),
        case({"max_pixels": 50}, "option max_pixels: 178956970 on rank 0", kept=False),
    ],
)
def test_options_that_decide_who_serves_what_must_agree(
    comm: Comm, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    """A rank with a different seed serves samples that others serve, and leaves out some."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    source = arrays_are_in_another_order(tmp_path, False)
    cache = cx.DataCache(source, memory=tmp_path, **(options if last(comm) else {}))
    assert named in refused_everywhere(comm, lambda: comm.gather_objects(None))
    cache.close()


def test_batches_to_train_with_must_agree_before_the_first_step(comm: Comm, tmp_path: Path) -> None:
    """Both ranks take equally many steps in an epoch, so no other check finds the difference."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    images = np.zeros((18, 4, 4), np.uint8)
    cache = cx.DataCache(Arrays(images, np.arange(18) % 3), memory=tmp_path)
    batches = cache.dataset(cx.BatchSpec(4 if last(comm) else 3, drop_remainder=False))
    net = keras.Sequential([keras.layers.Input((4, 4, 1)), keras.layers.Flatten()])
    net.add(keras.layers.Dense(3))
    net.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
    said = refused_everywhere(
        comm, lambda: net.fit(batches, verbose=0, callbacks=[callbacks.BroadcastState()])
    )
    assert "batch: 3 on rank 0, 4 on rank 1" in said and int(net.optimizer.iterations) == 0
    cache.close()


def test_a_loop_without_callbacks_is_refused_at_its_first_step(comm: Comm, tmp_path: Path) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    cache = cx.DataCache(a_copy_is_incomplete(tmp_path, last(comm)), memory=tmp_path)
    weight = keras.Variable([1.0])
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1))
    said = refused_everywhere(comm, lambda: optimizer.apply_gradients([(tf.ones(1), weight)]))
    assert "class 'bee'" in said
    cache.close()


def test_a_cache_of_one_rank_alone_makes_no_rank_wait(comm: Comm, tmp_path: Path) -> None:
    """To validate on rank 0; also beside one that all ranks make."""
    source = arrays_are_in_another_order(tmp_path, False)
    caches = []
    if comm.rank == 0:
        caches.append(cx.DataCache(source, memory=tmp_path))
        assert len(list(caches[0].dataset(cx.BatchSpec(1)))) == 9 // comm.topology.size
    other = classes_are_in_another_order(tmp_path, False)
    caches.append(cx.DataCache(other, memory=tmp_path))
    alone = cx.Topology(1, 1)
    mine = Arrays(np.zeros((9, 4, 4), np.uint8), np.full(9, comm.rank))
    caches.append(cx.DataCache(mine, topology=alone, rank=0, memory=tmp_path))
    assert comm.gather_objects(1) == [1] * comm.topology.size
    for cache in caches:
        cache.close()
    comm.comparisons.forget()


def recipe(comm: Comm, data: dict[str, Any], **settings: Any) -> Recipe:
    given = {"name": "small", "data": data, "model": {"name": "small_cnn", "filters": [4, 8]}}
    given |= {"batch_per_rank": 2, "phases": [{"epochs": 2, "resolution": 8}]}
    given |= {"learning_rate": {"peak": 0.05}, "node_size": comm.topology.slots}
    return Recipe.model_validate(given | settings)


@pytest.mark.parametrize("split", [case("train", kept=False), "test"])
def test_a_recipes_data_are_compared_before_it_trains(
    comm: Comm, tmp_path: Path, split: str
) -> None:
    """The test pictures, too: their scores are sums over the ranks."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    for name, ants in (("train", 6), ("test", 7)):
        differs = last(comm) and name == split
        pictures(tmp_path / name, {"ant": ants, "bee": 6 - differs})
    data = {"name": "folder", "folder": tmp_path, "memory": tmp_path}
    said = refused_everywhere(comm, lambda: prepare(recipe(comm, data), tmp_path))
    assert f"{split} on rank 0" in said and "class 'bee': 6 files" in said


def test_a_recipes_settings_are_compared_before_its_data_are_read(
    comm: Comm, tmp_path: Path
) -> None:
    """Each node reads its own file, which may be an old one. Only paths may differ."""
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    data = {"name": "folder", "folder": tmp_path / f"{comm.rank}"}  # There is none
    mine = recipe(comm, data, seed=comm.rank)
    said = refused_everywhere(comm, lambda: prepare(mine, tmp_path))
    assert "same recipe" in said and "differ in seed: 0 on rank 0, 1 on rank 1." in said


def test_a_vocabulary_of_other_sentences_is_refused(comm: Comm, tmp_path: Path) -> None:
    """Each node learns its own, from its own files: numbers then stand for other words."""
    pytest.importorskip("sentencepiece")
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = [" ".join(words[n % 7 : n % 7 + 3]) for n in range(40)]
    if last(comm):
        lines[7] = "another sentence"
    for name in ("source", "target", "test_source", "test_target"):
        (tmp_path / name).write_text("\n".join(lines))
    files = {name: tmp_path / name for name in ("source", "target", "test_source", "test_target")}
    data = {"name": "text_files", "vocabulary": 64, "kept": tmp_path / "kept", **files}
    text = recipe(
        comm,
        data,
        model={"name": "transformer"},
        task={"name": "translate", "bleu_sentences": 0},
        batch_per_rank=64,
        phases=[{"epochs": 2, "resolution": 16}],
    )
    said = refused_everywhere(comm, lambda: prepare(text, tmp_path))
    assert "training pairs: 40 pairs" in said and "vocabulary: " in said
