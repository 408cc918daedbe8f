"""Batches by length: as many steps on every rank and in every epoch, and no pair twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfcommx.core import ConfigurationError
from tfcommx.recipes.text.batches import LengthBatches, bounds, in_order, padded

LENGTHS = st.lists(st.integers(1, 40), max_size=120)


@given(LENGTHS, st.integers(32, 80), st.integers(1, 4), st.integers(0, 3))
def test_batches_of_all_ranks(lengths, words, ranks, epoch):
    batches = LengthBatches(np.array(lengths, int), words, 32, ranks, seed=1)
    of_ranks = [batches.epoch(epoch, rank) for rank in range(ranks)]
    assert {len(own) for own in of_ranks} == {batches.steps}
    for together in zip(*of_ranks, strict=True):
        assert len({(batch.length, len(batch.sentences)) for batch in together}) == 1
        assert together[0].length * len(together[0].sentences) <= words
    sentences = [n for own in of_ranks for batch in own for n in batch.sentences]
    assert len(sentences) == len(set(sentences))
    for own in of_ranks:
        for batch in own:
            assert all(lengths[n] <= batch.length <= 32 for n in batch.sentences)
    # Sentences left out are too long, or too few for the last global batch
    fitting = sum(length <= 32 for length in lengths)
    assert fitting - len(sentences) < batches.sizes[-1] or not fitting


def test_epochs_differ_and_are_repeatable():
    batches = LengthBatches(np.arange(200) % 30 + 1, 64, 32, 2, seed=1)
    first, again, later = (
        [batch.sentences.tolist() for batch in batches.epoch(epoch, 0)] for epoch in (0, 0, 1)
    )
    assert first == again != later
    other = LengthBatches(np.arange(200) % 30 + 1, 64, 32, 2, seed=2).epoch(0, 0)
    assert [batch.sentences.tolist() for batch in other] != first


def test_most_of_a_batch_is_words():
    """Lengths as in the catalogues, most of them short: two thirds of the entries are words."""
    lengths = np.random.default_rng(0).geometric(0.1, 20_000)
    batches = LengthBatches(lengths, 1024, 64, 1, seed=0)
    words = sum(lengths[batch.sentences].sum() for batch in batches.epoch(0, 0))
    entries = sum(batch.length * len(batch.sentences) for batch in batches.epoch(0, 0))
    assert words / entries > 0.67


@given(LENGTHS, st.integers(1, 80), st.integers(1, 4))
def test_in_evaluation_each_pair_comes_once(lengths, words, ranks):
    found = []
    for rank in range(ranks):
        for batch in in_order(np.array(lengths, int), words, rank, ranks):
            assert batch.length == max(lengths[n] for n in batch.sentences)
            assert len(batch.sentences) == 1 or batch.length * len(batch.sentences) <= words
            found += batch.sentences.tolist()
    assert sorted(found) == list(range(len(lengths)))


def test_bounds_grow_to_the_longest():
    for longest in range(1, 300):
        found = bounds(longest)
        assert found[-1] == longest and found == sorted(set(found))


def test_padding():
    rows = [np.array([5, 6, 7]), np.array([8])]
    assert padded(rows, 2).tolist() == [[5, 6], [8, 0]]


def test_a_batch_that_holds_no_sentence_is_refused():
    with pytest.raises(ConfigurationError, match=r"\b32\b.*\b31\b"):
        LengthBatches(np.array([1]), 31, 32, 1, 0)
