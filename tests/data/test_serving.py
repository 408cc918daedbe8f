"""Batches as users ask for them: epochs, resuming, Keras, strange pictures."""

import os
import threading
import time
import warnings

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import WHOLE, OpenCache, picture, served
from drawing import drawn
from PIL import Image

from tfcommx.core import ConfigurationError, Topology
from tfcommx.data import pipeline
from tfcommx.data.options import BatchSpec
from tfcommx.data.sources.arrays import Arrays


def test_resume_gives_the_batches_of_an_uninterrupted_run(folder, shm):
    spec = BatchSpec(batch=7, resolution=12, crop="random", flip=True)
    with OpenCache(folder, shm, seed=9) as cache:
        whole = [
            (images.numpy(), labels.numpy()) for images, labels in cache.dataset(spec, 1, epochs=2)
        ]
        assert len(whole) == 2 * cache.steps(spec) == 14
    with OpenCache(folder, shm, seed=9) as cache:
        resumed = [
            (images.numpy(), labels.numpy())
            for images, labels in cache.dataset(spec, 1, epochs=2, step=5)
        ]
    assert len(resumed) == 9
    for (images, labels), (again, labels_again) in zip(whole[5:], resumed, strict=True):
        np.testing.assert_array_equal(images, again)
        np.testing.assert_array_equal(labels, labels_again)


class CountedReads(Arrays):
    """Counts how often samples are read."""

    reads = 0

    def read(self, sample):
        self.reads += 1
        return super().read(sample)


def test_later_epochs_are_augmented_anew_from_memory_alone(shm):
    """Reading and decoding happen in the first epoch only, crops and mirroring in each."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16, 20, 3), np.uint8)
    source = CountedReads(pixels, np.arange(24))
    spec = BatchSpec(batch=8, resolution=12, crop="random", flip=True, dtype="uint8")
    epochs, reads = [], []
    with OpenCache(source, shm) as cache:
        for epoch in range(3):
            batches = list(cache.dataset(spec, epoch))
            images = np.concatenate([images.numpy() for images, _ in batches])
            labels = np.concatenate([labels.numpy() for _, labels in batches])
            epochs.append(images[np.argsort(labels)])
            reads.append(source.reads)
        assert [cache.report(epoch)["hit_memory"] for epoch in (1, 2)] == [1, 1]
    assert reads[0] >= 24 and reads[1:] == [reads[0]] * 2
    for one, other in ((0, 1), (1, 2)):
        same = [np.array_equal(a, b) for a, b in zip(epochs[one], epochs[other], strict=True)]
        assert sum(same) < 4


def test_a_dataset_of_a_rank_refuses_to_be_sharded_again(folder, shm):
    """A usual line of scripts left half of the batches out, on both ranks."""
    spec = BatchSpec(batch=4, resolution=12)
    with OpenCache(folder, shm, Topology(1, 2), rank=1) as cache:
        dataset = cache.dataset(spec)
        with pytest.raises(ConfigurationError, match=r"shard\(2, 1\).*`shard`"):
            dataset.shard(2, 1)
        steps = cache.steps(spec)
        assert len(list(dataset.shard(3, 0))) == -(-steps // 3)
    with OpenCache(folder, shm) as cache:
        assert len(list(cache.dataset(spec).shard(1, 0))) == cache.steps(spec)


def test_an_epoch_that_is_served_again_is_announced(folder, shm):
    """`fit(cache.dataset(spec), epochs=90)` served the same crops 90 times, without a warning."""
    with OpenCache(folder, shm, store=10) as cache:
        with pytest.warns(
            UserWarning,
            match=r"store=10\b.*resolution=16\b",
        ):
            twice = cache.dataset(WHOLE, 0, 2)
        assert (
            len(twice) == 2 * cache.steps(WHOLE)
            and len(cache.dataset(WHOLE, 0, 2, step=3)) == len(twice) - 3
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            test = cache.dataset(
                BatchSpec(batch=7, resolution=8, dtype="uint8", shuffle=False, drop_remainder=False)
            )
            assert len(list(twice)) == len(twice) and len(list(test)) == len(list(test))
        with pytest.warns(UserWarning, match=r"Epoch 1\b"):
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
    with OpenCache(folder, shm, store=20) as cache:
        assert cache.source.classes == ("a", "b-empty", "c-one")
        got = served(
            cache.dataset(
                BatchSpec(
                    batch=3, resolution=16, dtype="uint8", drop_remainder=False, shuffle=False
                )
            )
        )
        assert [label for _, label in got] == [0] * 7 + [2]
        assert [n for n, _ in got][1:] == [1, 2, 3, 4, 5, 6, 7]
        shapes = [cache.slab.get(i)[0].shape for i in range(8)]
        assert shapes[3] == (20, 27, 3) and shapes[5] == (1, 1, 3) and shapes[6] == (3, 900, 3)
        grey = cache.slab.get(0)[0]
        assert np.ptp(grey.reshape(-1, 3), axis=1).max() == 0


def test_keras_trains_and_the_wait_is_reported(shm):
    import keras

    source = Arrays(
        np.random.default_rng(0).integers(0, 256, (64, 8, 8), np.uint8), np.arange(64) % 4
    )
    with OpenCache(source, shm) as cache:
        spec = BatchSpec(batch=16)
        assert next(iter(cache.dataset(spec)))[0].shape == (16, 8, 8, 1)
        model = keras.Sequential(
            [keras.layers.Flatten(), keras.layers.Dense(4, activation="softmax")]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(
            cache.dataset(spec, 0, epochs=3),
            epochs=3,
            steps_per_epoch=cache.steps(spec),
            verbose=0,
        )
        first, *others = (cache.report(epoch)["samples"] for epoch in range(3))
        # The look above took one batch, or had the next one ready
        assert others == [64, 64] and first in (64 + 16, 64 + 32)
        for _ in cache.dataset(spec, 5):
            time.sleep(0.1)  # a slow consumer does not wait
        quick = cache.report(5)["loader_wait_seconds"]
        fetch, cache.filler.fetch = (
            cache.filler.fetch,
            lambda *args: (time.sleep(1), fetch(*args))[1],
        )
        for sample in range(64):
            cache.slab.forget(sample)
        for _ in cache.dataset(spec, 6):
            pass
        assert quick < 0.9 < 1 < cache.report(6)["loader_wait_seconds"]


def test_operations_that_must_be_deterministic_cost_the_clock(folder, shm):
    # There is no public way back
    from tensorflow.python.framework.config import disable_op_determinism

    tf.config.experimental.enable_op_determinism()
    try:
        with OpenCache(folder, shm) as cache:
            assert sorted(served(cache.dataset(WHOLE))) == [(n, n % 3) for n in range(50)]
            report = cache.report(0)
            assert report["samples"] == 50 and np.isnan(report["loader_wait_seconds"])
    finally:
        disable_op_determinism()


def test_a_dataset_is_not_made_inside_a_function(folder, shm):
    with (
        OpenCache(folder, shm) as cache,
        pytest.raises(ConfigurationError, match=r"`dataset`.*tf\.function"),
    ):
        tf.function(lambda: cache.dataset(WHOLE), autograph=False)()


@pytest.mark.extended
def test_batches_can_be_sent_ahead_to_a_device(folder, shm):
    """As docs/how-to/data-cache.md describes for a GPU; without one the code path is the same."""
    with OpenCache(folder, shm) as cache:
        ahead = cache.dataset(WHOLE, 0, 2).apply(tf.data.experimental.prefetch_to_device("/cpu:0"))
        assert served(ahead) == served(cache.dataset(WHOLE, 0, 2))


def test_an_epoch_without_a_batch_is_refused(shm):
    with OpenCache(
        Arrays(np.zeros((3, 4, 4), np.uint8), np.zeros(3)), shm, Topology(1, 2), 0
    ) as cache:
        with pytest.raises(ConfigurationError, match=r"\b3\b.*\b2\b.*`batch`"):
            cache.dataset(BatchSpec(batch=2))
        assert len(list(cache.dataset(BatchSpec(batch=2, drop_remainder=False)))) == 1


def test_a_rank_without_samples_in_a_step_is_served_an_empty_batch(shm):
    source = Arrays(np.zeros((3, 9, 7, 3), np.uint8), np.arange(3))
    with OpenCache(source, shm, Topology(1, 2), 0) as cache:
        with pytest.warns(UserWarning, match=r"\b1 .*\b2\b"):
            dataset = cache.dataset(BatchSpec(batch=1, drop_remainder=False))
        shapes = [tuple(images.shape) for images, _ in dataset]
    assert sorted(shapes) == [(0, 9, 7, 3), (1, 9, 7, 3)]


@pytest.mark.parametrize(("ranks", "on_error"), drawn([1, 2, 4], ["raise", "skip"]))
def test_an_evaluation_has_no_empty_batches(shm, ranks, on_error):
    """A convolution refused the batch of a rank without samples, as with one picture on two."""
    source = Arrays(np.zeros((3, 9, 7, 3), np.uint8), np.arange(3))
    spec, labels = BatchSpec(batch=1, shuffle=False, drop_remainder=False), []
    for rank in range(ranks):
        with OpenCache(source, shm, Topology(1, ranks), rank, on_error=on_error) as cache:
            for epochs, step in ((1, 0), (2, 0), (1, 1)):
                dataset = cache.dataset(spec, 0, epochs, step)
                batches = [numbers.numpy().tolist() for _, numbers in dataset]
                assert all(len(batch) == 1 for batch in batches)
                if on_error == "raise":
                    assert len(dataset) == len(batches)
                if (epochs, step) == (1, 0):
                    labels += [label for batch in batches for label in batch]
    assert sorted(labels) == [0, 1, 2]


def test_warm_brings_all_for_another_process_too(folder, shm):
    with OpenCache(folder, shm) as one, OpenCache(folder, shm) as other:
        assert other.slab.filled == 0
        assert len(list(one.warming())) == one.warming_steps == 1
        assert other.slab.filled == 50
        assert sorted(served(other.dataset(WHOLE))) == [(n, n % 3) for n in range(50)]
        assert other.report(0)["hit_memory"] == 1


def test_a_turned_photograph_is_served_as_it_was_stored(tmp_path, shm):
    """EXIF orientation is not applied, as in torchvision's ImageFolder and TensorFlow's decoder."""
    photo = np.zeros((32, 32, 3), np.uint8)
    photo[:16] = 255  # the upper half is white; orientation 6 would put it to the right
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a").mkdir()
    Image.fromarray(photo).save(tmp_path / "a" / "turned.jpg", exif=exif)
    with OpenCache(tmp_path, shm) as cache:
        image = next(iter(cache.dataset(BatchSpec(1, dtype="uint8"))))[0][0].numpy()
        assert image[:12].min() > 200 and image[20:].max() < 50


def test_the_end_of_the_process_waits_for_calls_under_way_and_lets_none_begin(monkeypatch):
    """Otherwise TensorFlow's threads may call a Python that has ended, and the process hangs.

    It happened now and then, after an error.
    """
    monkeypatch.setattr(pipeline, "_ended", False)
    begun, done = threading.Event(), []
    work = pipeline.weak_method(
        pipeline.of_one_rank, lambda _: (begun.set(), time.sleep(0.2), done.append(True))
    )
    threading.Thread(target=work).start()
    assert begun.wait(60)
    pipeline._end()
    assert done == [True]
    with pytest.raises(RuntimeError):
        work()
    assert done == [True]


def test_a_forked_child_does_not_wait_for_calls_of_its_parent(monkeypatch):
    monkeypatch.setattr(pipeline, "_inside", 1)
    if (child := os.fork()) == 0:
        os._exit(pipeline._inside)
    assert os.waitpid(child, 0)[1] == 0
