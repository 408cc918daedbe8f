"""Every rank is served its own part of the images; all that is random is a function of its seed."""

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.data.cache.batch_spec import BatchSpec
from tfcommx.data.cache.cache import DataCache
from tfcommx.data.sources.arrays import Arrays
from tfcommx.recipes.datasets.shift import resize, shifted, training_batches
from tfcommx.recipes.tasks.classify import Classification
from tfcommx.terms import Topology

COUNT, BATCH = 103, 4
PICTURES = np.random.default_rng(0).integers(0, 256, (COUNT, 28, 28, 1), dtype=np.uint8)
LABELS = np.arange(COUNT) % 10


def batches(memory, rank=0, epochs=range(2), resolution=14, shift=1, flip=True) -> list:
    cache = DataCache(
        Arrays(PICTURES, LABELS), topology=Topology(1, 2), rank=rank, seed=1, memory=memory
    )
    spec = BatchSpec(BATCH, resolution, flip=flip, std=(1 / 255,))
    served = training_batches(cache, spec, epochs, shift)
    got = list(Classification(10, 0.0).targets(served).as_numpy_iterator())
    assert len(got) == len(epochs) * cache.steps(spec) == len(epochs) * (COUNT // 2 // BATCH)
    rows = [cache.share(epoch) for epoch in epochs]
    cache.close()
    return got, rows


def test_batches_are_repeatable_and_differ_between_ranks_and_epochs(tmp_path):
    here, again, there = (batches(tmp_path, rank)[0] for rank in (0, 0, 1))
    assert here[0][0].shape == (BATCH, 14, 14, 1) and here[0][0].dtype == np.float32
    for (x, y), (x_again, y_again) in zip(here, again, strict=True):
        assert np.array_equal(x, x_again) and np.array_equal(y, y_again)
    assert not np.array_equal(here[0][0], there[0][0]) and not np.array_equal(
        here[0][0], here[len(here) // 2][0]
    )
    later = batches(tmp_path, epochs=range(1, 2))[0]  # as a resumed run asks for them
    for (x, _), (x_again, _) in zip(here[len(here) // 2 :], later, strict=True):
        assert np.array_equal(x, x_again)


def test_plain_batches_are_the_images_of_the_share(tmp_path):
    got, (row,) = batches(tmp_path, 1, range(7, 8), 28, 0, False)
    x, y = (np.concatenate(part) for part in zip(*got, strict=True))
    np.testing.assert_allclose(x, PICTURES[row[: len(x)]], atol=1e-3)
    assert np.array_equal(y.argmax(1), LABELS[row[: len(x)]]) and y.sum() == len(x)


def test_shifts_go_every_way():
    picture = tf.constant(PICTURES[:2])
    found = {
        next(
            (dy, dx)
            for dy in (-1, 0, 1)
            for dx in (-1, 0, 1)
            if np.array_equal(
                shifted(picture, tf.constant([number, 0]), 1),
                np.roll(PICTURES[:2], (dy, dx), (1, 2)),
            )
        )
        for number in range(60)
    }
    assert len(found) == 9


@pytest.mark.parametrize("resolution", [8, 14, 20, 28])
def test_tests_are_resized_as_training_is(tmp_path, resolution):
    got, (row,) = batches(tmp_path, 0, range(1), resolution, 0, False)
    np.testing.assert_allclose(
        got[0][0], resize(tf.constant(PICTURES[row[:BATCH]]), resolution), atol=0.1
    )
