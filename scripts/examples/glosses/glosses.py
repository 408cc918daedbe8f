"""Data set, model and task of glosses.yaml: which field of life a word's explanation is about.

WordNet explains 117,000 meanings of English words, each filed under one of 45 fields: food,
plants, motion, feelings, ... Nearly all weights of the network are an embedding of the words.

    apt-get install wordnet-base
    cd scripts/examples/glosses; tfcommx train glosses.yaml --processes 4
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.core import DataError
from tfcommx.recipes.families import Data, DataRank
from tfcommx.recipes.tasks.classify import Classification

FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
FIELDS = 45
# Entries of the embedding that no word has: padding, and words outside of the vocabulary
PADDING, OTHER = 0, 1
# One explanation in ten is for evaluation
ONE_IN = 10


def read_glosses(folder: Path) -> tuple[list[list[str]], np.ndarray]:
    """Return the words of each explanation, and its field, int32 in [0, FIELDS)."""
    texts, fields = [], []
    for name in FILES:
        if not (folder / name).exists():
            raise DataError(f"{folder / name} is missing. On Debian: apt-get install wordnet-base")
        for line in (folder / name).read_text().splitlines():
            head, bar, gloss = line.partition(" | ")
            if bar and not line.startswith(" "):  # The licence is indented
                texts.append(re.findall("[a-z]+", gloss.partition('; "')[0].lower()))
                fields.append(int(head.split()[1]))
    return texts, np.array(fields, np.int32)


def split(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the explanations for training, and of those for evaluation."""
    shuffled = np.random.default_rng(0).permutation(count)
    return np.delete(shuffled, slice(None, None, ONE_IN)), shuffled[::ONE_IN]


def open_glosses(
    place: DataRank, folder: str = "/usr/share/wordnet", vocabulary: int = 20000
) -> Data:
    """Open the explanations on this rank."""
    texts, fields = read_glosses(Path(folder))
    counts = collections.Counter(word for place in split(len(texts))[0] for word in texts[place])
    # In the order of the words where counts are equal: the same on all ranks
    common = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    number = {word: place for place, word in enumerate(common, OTHER + 1)}
    numbered = [[number.get(word, OTHER) for word in text] for text in texts]
    return Glosses(place, numbered, fields, len(common) + 2)


@dataclass(frozen=True)
class Glosses:
    """Explanations as numbers of words, open on one rank; see `recipes.families.Data`."""

    place: DataRank
    texts: list[list[int]]
    fields: np.ndarray
    inputs: int
    classes: tuple[str, ...] = tuple(map(str, range(FIELDS)))
    redistributes: bool = False

    @property
    def count(self) -> int:
        return len(split(len(self.texts))[0])

    def steps(self, batch: int, resolution: int) -> int:
        return self.count // (batch * self.place.topology.size)

    def train(self, batch: int, resolution: int, epochs: range, step: int = 0) -> tf.data.Dataset:
        joint, rank = batch * self.place.topology.size, self.place.rank
        training, _ = split(len(self.texts))

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for epoch in epochs:
                order = np.random.default_rng([self.place.seed, epoch]).permutation(training)
                first = step if epoch == epochs[0] else 0
                for start in range(first, self.steps(batch, resolution)):
                    part = order[start * joint + rank * batch :][:batch]
                    yield self._padded(part, resolution), self.fields[part]

        return _dataset(batches, batch, resolution)

    def test(self, batch: int, resolution: int) -> tf.data.Dataset:
        mine = split(len(self.texts))[1][self.place.rank :: self.place.topology.size]

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for start in range(0, len(mine), batch):
                part = mine[start : start + batch]
                yield self._padded(part, resolution), self.fields[part]

        return _dataset(batches, None, resolution)

    def _padded(self, part: np.ndarray, length: int) -> np.ndarray:
        """Return int32 [texts, length]; longer ones are cut."""
        padded = np.full((len(part), length), PADDING, np.int32)
        for row, which in zip(padded, part, strict=True):
            words = self.texts[which][:length]
            row[: len(words)] = words
        return padded

    def redistribute(self, epoch: int, comm: Any) -> None:
        """Do nothing: every rank has all explanations."""

    def report(self, epoch: int) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing, because the memory is freed with the process."""


def _dataset(batches: Any, batch: int | None, length: int) -> tf.data.Dataset:
    like = (tf.TensorSpec([batch, length], tf.int32), tf.TensorSpec([batch], tf.int32))
    return tf.data.Dataset.from_generator(batches, output_signature=like).prefetch(2)


def build_net(inputs: int, outputs: int, width: int = 64) -> keras.Model:
    """Build a network that adds up the words' vectors, whatever their order."""
    words = keras.Input((None,), dtype="int32")
    vectors = keras.layers.Embedding(inputs, width)(words)
    is_word = keras.ops.expand_dims(keras.ops.cast(words != PADDING, "float32"), -1)
    flow = keras.ops.sum(vectors * is_word, axis=1)
    flow = keras.layers.Dense(2 * width, activation="relu")(flow)
    return keras.Model(words, keras.layers.Dense(outputs)(flow))


class GlossClassification(Classification):
    """Classification whose batches are counted in explanations."""

    counted = "explanations"


def classify(data: Data) -> GlossClassification:
    return GlossClassification(data.inputs, len(data.classes))


def adam(epsilon: float = 1e-7) -> keras.optimizers.Optimizer:
    """Make an optimizer; the recipe sets its learning rate in every step."""
    return keras.optimizers.Adam(0.0, epsilon=epsilon)
