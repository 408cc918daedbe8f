"""Who lets an iterator go does not wait for a thread of it that sleeps."""

import time

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.data.cache import DataCache
from tfcommx.data.options import BatchSpec
from tfcommx.data.sources.arrays import Arrays
from tfcommx.recipes.datasets.sentence_pairs import WORDS, _dataset


@pytest.fixture
def pictures(tmp_path):
    cache = DataCache(Arrays(np.zeros((80, 4, 4, 3), np.uint8), np.arange(80)), memory=tmp_path)
    yield cache.dataset(BatchSpec(2, 4), epochs=100)
    cache.close()


@pytest.mark.serial
def test_iterators_of_some_seconds_go_at_once(pictures):
    """With tf.data's tuning, about two thirds of them take as long to go as they were there."""
    iterators = [iter(pictures) for _ in range(30)]
    end = time.monotonic() + 4
    while time.monotonic() < end:
        for iterator in iterators:
            next(iterator)
        time.sleep(0.05)
    longest = 0.0
    while iterators:
        start = time.monotonic()
        iterators.pop()
        longest = max(longest, time.monotonic() - start)
    assert longest < 1.5


def test_stages_and_options_that_others_add_turn_no_tuning_on(pictures):
    own = tf.data.Options()
    own.threading.private_threadpool_size = 1
    more = pictures.map(lambda image, label: (image, label), tf.data.AUTOTUNE).with_options(own)
    assert more.prefetch(tf.data.AUTOTUNE).options().autotune.enabled is False
    assert len(list(more.take(3))) == 3


def test_batches_of_sentences_are_not_tuned():
    batches = _dataset(lambda: iter([np.zeros((1, 1), np.int32)]), WORDS, 1)
    assert batches.options().autotune.enabled is False
    assert len(list(batches)) == 1
