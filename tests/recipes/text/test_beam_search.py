"""Beam search against an exhaustive search of all translations, and a plain loop over beams."""

import itertools
import math

import keras
import numpy as np
import pytest

from tfcommx.recipes.text.decoding import beam_decoder
from tfcommx.recipes.text.vocabulary import BEGIN, END

# The four marks and a word. A translation has at most MORE words more than its source, with END
WORDS, MORE, LONGEST = 5, 2, 4
SOURCES = np.array([[4, 3], [4, 4], [3, 0], [1, 4]], np.int32)


class Table(keras.Model):
    """The next word's logits are random numbers, of the source and the last two words."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.table = keras.ops.array(random.normal(0, 2, [WORDS] * 4).astype(np.float32))

    def call(self, inputs, training=False):
        """Return float32 [n, words, WORDS]."""
        source, target = inputs["source"], inputs["target"]
        before = keras.ops.concatenate([target[:, :1], target[:, :-1]], axis=1)
        flat = keras.ops.reshape(self.table, [WORDS**3, WORDS])
        return keras.ops.take(flat, (source[:, -1:] * WORDS + before) * WORDS + target, axis=0)

    def log_probabilities(self, source, said) -> np.ndarray:
        """Return those of the next word, [WORDS]."""
        words = [BEGIN, *said]
        before = words[-2] if len(words) > 1 else BEGIN
        logits = np.asarray(self.table)[source[-1], before, words[-1]].astype(np.float64)
        return logits - math.log(np.exp(logits).sum())


def goodness(table, source, said, penalty) -> float:
    log = sum(table.log_probabilities(source, said[:n])[word] for n, word in enumerate(said))
    return log / ((5 + len(said)) / 6) ** penalty


def up_to_end(said) -> tuple:
    words = [int(word) for word in said]
    return tuple(words[: words.index(END) + 1] if END in words else words)


def most_words(source) -> int:
    return np.count_nonzero(source) + MORE


def up_to_limit(rows) -> list[tuple]:
    """Return the translation of each source; END follows one that was cut."""
    pairs = zip(map(up_to_end, rows), SOURCES, strict=True)
    return [said[: most_words(source)] for said, source in pairs]


def by_trying_all(table, source, penalty) -> tuple:
    """Return the best of all translations that end, or are cut."""
    longest = most_words(source)
    whole = {up_to_end(said) for said in itertools.product(range(WORDS), repeat=longest)}
    return max(whole, key=lambda said: goodness(table, source, said, penalty))


def by_a_loop(table, source, penalty, beam) -> tuple:
    """Return the translation found by a beam search with plain lists."""
    kept = [()]
    for _ in range(most_words(source)):
        ended = [said for said in kept if END in said]
        open_ones = [said for said in kept if END not in said]
        grown = ended + [(*said, word) for said in open_ones for word in range(WORDS)]
        kept = sorted(grown, key=lambda said: -goodness(table, source, said, penalty))[:beam]
    return kept[0]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
def test_a_wide_beam_finds_the_best_of_all(penalty):
    for seed in range(2):
        table = Table(seed)
        said = beam_decoder(table, WORDS**LONGEST, penalty, MORE)(SOURCES).numpy()
        found = up_to_limit(said)
        assert found == [by_trying_all(table, source, penalty) for source in SOURCES], seed


@pytest.mark.extended
def test_narrow_beams_keep_the_best():
    """They miss the best of all, and agree with a plain loop."""
    missed = 0
    for seed, (beam, penalty) in itertools.product(range(2), [(1, 0.6), (2, 0.0), (3, 0.6)]):
        table = Table(seed)
        said = beam_decoder(table, beam, penalty, MORE)(SOURCES).numpy()
        found = up_to_limit(said)
        assert found == [by_a_loop(table, source, penalty, beam) for source in SOURCES], seed
        missed += found != [by_trying_all(table, source, penalty) for source in SOURCES]
    assert missed


def test_the_penalty_of_length_is_felt():
    tables = [Table(seed) for seed in range(4)]
    words = [
        sum(len(by_trying_all(table, source, penalty)) for table in tables for source in SOURCES)
        for penalty in (0.0, 3.0)
    ]
    assert words[0] < words[1]
