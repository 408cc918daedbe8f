"""Every rank reads its own part of the same shuffled images, and all that is random is a function of its seed."""

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.data import images

COUNT, BATCH = 103, 4
PICTURES = np.random.default_rng(0).integers(0, 256, (COUNT, 28, 28, 1), dtype=np.uint8)
LABELS = np.arange(COUNT) % 10


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_shards_are_disjoint_and_equally_long(ranks):
    steps = images.steps_per_epoch(COUNT, ranks, BATCH)
    shards = [images.shard(COUNT, 5, 2, rank, ranks, BATCH) for rank in range(ranks)]
    assert all(shard.shape == (steps, BATCH) for shard in shards)
    read = np.concatenate([shard.ravel() for shard in shards])
    assert len(set(read)) == len(read) == steps * ranks * BATCH and read.max() < COUNT


def test_a_global_batch_holds_the_same_images_for_any_number_of_ranks():
    alone = images.shard(COUNT, 5, 2, 0, 1, 4 * BATCH)
    four = np.concatenate([images.shard(COUNT, 5, 2, rank, 4, BATCH) for rank in range(4)], axis=1)
    assert np.array_equal(alone, four)


def test_the_order_is_a_function_of_seed_and_epoch():
    first = images.shard(COUNT, 5, 2, 0, 2, BATCH)
    assert np.array_equal(first, images.shard(COUNT, 5, 2, 0, 2, BATCH))
    assert not np.array_equal(first, images.shard(COUNT, 5, 3, 0, 2, BATCH))
    assert not np.array_equal(first, images.shard(COUNT, 6, 2, 0, 2, BATCH))


def batches(rank: int = 0, **more) -> list:
    settings = dict(epochs=range(2), resolution=14, batch=BATCH, rank=rank, ranks=2, seed=1, shift=1, flip=True, prefetch=2)
    return list(images.training_batches(PICTURES, LABELS, 10, **(settings | more)).as_numpy_iterator())


def test_batches_are_repeatable_and_differ_between_ranks_and_epochs():
    here, again, there = batches(), batches(), batches(rank=1)
    steps = images.steps_per_epoch(COUNT, 2, BATCH)
    assert len(here) == 2 * steps and here[0][0].shape == (BATCH, 14, 14, 1) and here[0][0].dtype == np.float32
    for (x, y), (x_again, y_again) in zip(here, again, strict=True):
        assert np.array_equal(x, x_again) and np.array_equal(y, y_again)
    assert not np.array_equal(here[0][0], there[0][0]) and not np.array_equal(here[0][0], here[steps][0])


def test_plain_batches_are_the_images_of_the_shard():
    rows = images.shard(COUNT, 1, 7, 1, 2, BATCH)
    for row, (x, y) in zip(rows, batches(rank=1, epochs=range(7, 8), resolution=28, shift=0, flip=False), strict=True):
        assert np.array_equal(x, PICTURES[row]) and np.array_equal(y.argmax(1), LABELS[row]) and y.sum() == BATCH


def test_variation_mirrors_some_and_shifts_all():
    picture = tf.constant(PICTURES[:64])
    seed = tf.constant([1, 2])
    mirrored = images.vary(picture, seed, 0, True).numpy()
    same = (mirrored == PICTURES[:64]).all(axis=(1, 2, 3))
    turned = (mirrored == PICTURES[:64, :, ::-1]).all(axis=(1, 2, 3))
    assert 16 < same.sum() < 48 and (same ^ turned).all()
    shifts = {tuple(int(s) for s in found) for number in range(60) for found in
              [next((dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if np.array_equal(
                  images.vary(picture[:2], tf.constant([number, 0]), 1, False), np.roll(PICTURES[:2], (dy, dx), (1, 2))))]}
    assert len(shifts) == 9


def test_resize_averages():
    striped = np.zeros((1, 28, 28, 1), np.uint8)
    striped[:, ::2] = 200
    small = images.resize(tf.constant(striped), 14).numpy()
    assert small.shape == (1, 14, 14, 1) and np.allclose(small[:, 1:-1], 100, atol=30)
    assert np.array_equal(images.resize(tf.constant(striped), 28), striped)
