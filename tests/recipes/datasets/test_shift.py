"""Every rank is served its own part of the images; all that is random is a function of its seed."""

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.core import Topology
from tfcommx.data.sources.arrays import Arrays
from tfcommx.recipes.datasets import fashion_mnist
from tfcommx.recipes.datasets.pictures import Pictures, shifted
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.tasks.classify import Classification

COUNT, BATCH = 103, 4
PICTURES = np.random.default_rng(0).integers(0, 256, (COUNT, 28, 28, 1), dtype=np.uint8)
LABELS = np.arange(COUNT) % 10


def opened(memory, rank=0, shift=1, flip=True) -> Pictures:
    settings = fashion_mnist.FashionMnist(memory=memory, flip=flip, shift=shift)
    train = Arrays(PICTURES, LABELS, fashion_mnist.CLASSES)
    test = Arrays(PICTURES[::-1], LABELS[::-1], fashion_mnist.CLASSES, "test")
    place = DataRank(Topology(1, 2), rank, seed=1)
    return Pictures(settings, train, test, place, settings._shifted if shift else None)


def batches(memory, rank=0, epochs=range(2), resolution=14, shift=1, flip=True, step=0) -> tuple:
    data = opened(memory, rank, shift, flip)
    served = data.train(BATCH, resolution, epochs, step)
    got = list(Classification(1, 10).targets(served).as_numpy_iterator())
    assert data.steps(BATCH, resolution) == COUNT // 2 // BATCH
    assert len(got) == len(epochs) * data.steps(BATCH, resolution) - step
    rows = [data.cache.share(epoch) for epoch in epochs]
    data.close()
    return got, rows


@pytest.mark.extended
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
    middle = batches(tmp_path, step=5)[0]
    for (x, _), (x_again, _) in zip(here[5:], middle, strict=True):
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
def test_tests_are_resized_as_training_is_and_each_comes_once(tmp_path, resolution):
    """The test pictures are those of training in another order, without crop and flip."""
    parts = [opened(tmp_path, rank, 0, False) for rank in (0, 1)]
    tested = [pair for data in parts for pair in data.test(BATCH, resolution).as_numpy_iterator()]
    x, y = (np.concatenate(part) for part in zip(*tested, strict=True))
    assert np.array_equal(np.sort(y), np.sort(LABELS))
    rows = np.concatenate([data.test_cache.share(0, False) for data in parts])
    assert np.array_equal(np.sort(rows), np.arange(COUNT))
    by_picture = dict(zip((COUNT - 1 - rows).tolist(), x, strict=True))
    trained = parts[0].train(BATCH, resolution, range(1)).as_numpy_iterator()
    for number, picture in zip(parts[0].cache.share(0), next(trained)[0], strict=False):
        np.testing.assert_array_equal(picture, by_picture[int(number)])
    for data in parts:
        data.close()
