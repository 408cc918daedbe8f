"""Data set, model and task of end_to_end_language.yaml: a language model of Perl's manual.

    apt-get install perl-doc

Without root: `apt-get download perl-doc; dpkg -x perl-doc_*.deb FOLDER`, and in each call of the
benchmark `--set data.folder=FOLDER/usr/share/perl`. The manual is prose with examples, and free
(GPL or Artistic License). On Debian 12's a model of each byte by the two before it has 3.04 bits a
byte, and the best of such n-gram models, by five, 2.16 (counts interpolated by Witten and Bell).
The recipe's model has 2.10 at the end (docs/laboratory/training.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tfcommx.core import ConfigurationError, DataError
from tfcommx.recipes.families import Data, DataRank, Gather, Objective, Scorer
from tfcommx.recipes.text.batches import padded
from tfcommx.recipes.text.layers import WordAccuracy, WordLoss, count_right
from tfcommx.recipes.text.vocabulary import BEGIN, Vocabulary, learn

# A list of all headings, a table, and release notes, which repeat each other
OMITTED = re.compile("perltoc|perluniprops|perl.*delta")
# One document in ten is for evaluation
ONE_IN = 10


def read_documents(folder: Path) -> list[list[str]]:
    """Return the paragraphs of each document, in the order of the documents' names.

    White space becomes one space. Characters outside of ASCII are omitted, because those of a few
    names and translations would take much of a small vocabulary.

    **Raises:** DataError if there are fewer than ONE_IN documents.
    """
    files = {path.stem: path for path in folder.glob("*/pod/perl*.pod")}
    names = [name for name in sorted(files) if not OMITTED.fullmatch(name)]
    if len(names) < ONE_IN:
        raise DataError(
            f"At least {ONE_IN} documents are required in {folder}/*/pod/perl*.pod. Received "
            f"{len(names)}. On Debian: apt-get install perl-doc."
        )
    texts = [files[name].read_text("ascii", "ignore") for name in names]
    return [[" ".join(part.split()) for part in re.split(r"\n\s*\n", text)] for text in texts]


def open_manual(place: DataRank, folder: str = "/usr/share/perl", vocabulary: int = 2000) -> Data:
    """Open the manual on this rank; the last tenth of its documents is for evaluation."""
    documents = read_documents(Path(folder))
    cut = len(documents) - len(documents) // ONE_IN
    train, test = (list(chain(*part)) for part in (documents[:cut], documents[cut:]))
    pieces = Vocabulary(learn(train, vocabulary))
    streams = [np.concatenate([[BEGIN], *pieces.encode(texts)]) for texts in (train, test)]
    # Each paragraph has an end, which is predicted too
    return Text(place, *streams, sum(len(text) + 1 for text in test), pieces.words)


@dataclass(frozen=True)
class Text:
    """A text as numbers of word pieces, open on one rank; see `recipes.families.Data`.

    A batch is (pieces, labels), both int32 [sequences, resolution]: the label is the next piece.
    """

    place: DataRank
    # Word pieces of all paragraphs after a first BEGIN, int [n]
    training: np.ndarray
    testing: np.ndarray
    # Bytes of the text for evaluation
    test_bytes: int
    classes: tuple[str, ...]
    redistributes: bool = False

    @property
    def inputs(self) -> int:
        return len(self.classes)

    @property
    def count(self) -> int:
        return len(self.training) - 1

    def steps(self, batch: int, resolution: int) -> int:
        if batch < resolution:
            raise ConfigurationError(
                f"A batch needs at least the word pieces of a sequence, {resolution}. Received "
                f"{batch}. Raise the batch, or lower the phase's resolution."
            )
        return self.count // resolution // (batch // resolution * self.place.topology.size)

    def train(self, batch: int, resolution: int, epochs: range, step: int = 0) -> tf.data.Dataset:
        shape = self.steps(batch, resolution), self.place.topology.size, batch // resolution
        starts: list[np.ndarray] = []
        for epoch in epochs:
            random = np.random.default_rng([self.place.seed, epoch])
            order = random.permutation(self.count // resolution)[: math.prod(shape)]
            starts += [*resolution * order.reshape(shape)[:, self.place.rank]]
        return batches(self.training, starts[step:], resolution)

    def test(self, batch: int, resolution: int) -> tf.data.Dataset:
        starts = np.arange(0, len(self.testing) - 1, resolution)
        starts = starts[self.place.rank :: self.place.topology.size]
        rows = batch // resolution
        parts = [starts[first : first + rows] for first in range(0, len(starts), rows)]
        return batches(self.testing, parts, resolution)

    def redistribute(self, epoch: int, comm: Any) -> None:
        """Do nothing, because every rank has the whole text."""

    def report(self, epoch: int) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing, because the memory is freed with the process."""


def batches(stream: np.ndarray, starts: Sequence[np.ndarray], length: int) -> tf.data.Dataset:
    """Return the batches of sequences that begin at `starts`; the stream's last one is padded."""

    def served() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for firsts in starts:
            windows = padded([stream[first : first + length + 1] for first in firsts], length + 1)
            yield windows[:, :-1], windows[:, 1:]

    like = tf.TensorSpec([None, length], tf.int32)
    return tf.data.Dataset.from_generator(served, output_signature=(like, like)).prefetch(2)


def network(
    inputs: int, outputs: int, blocks: int, width: int, heads: int, context: int
) -> keras.Model:
    """Make a decoder of pre-norm blocks with learnt positions.

    Args:
        inputs, outputs: word pieces of the vocabulary, which are equal. Their embeddings are two,
            because with a shared one the first hundreds of steps learn less.
        blocks: each of causal self-attention and two dense layers.
        width: of the embedding; four times as wide inside of a block.
        heads: of the attention, a divisor of the width.
        context: the longest sequence.
    """
    initial = keras.initializers.RandomNormal(stddev=0.02)
    pieces = keras.Input((None,), dtype="int32")
    positions = ops.cumsum(ops.ones_like(pieces), axis=1) - 1
    flow = layers.Embedding(inputs, width, initial)(pieces)
    flow = flow + layers.Embedding(context, width, initial)(positions)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(flow)
        attention = layers.MultiHeadAttention(heads, width // heads)
        flow = flow + attention(normed, normed, use_causal_mask=True)
        hidden = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(flow))
        flow = flow + layers.Dense(width)(hidden)
    logits = layers.Dense(outputs, use_bias=False)(layers.LayerNormalization()(flow))
    return keras.Model(pieces, logits, name="language")


def predict_next(data: Text) -> Objective:
    """Make the task of the recipe."""
    return Prediction(data, data.inputs, data.inputs)


@dataclass(frozen=True)
class Prediction:
    """Prediction of the next word piece; see `recipes.families.Objective`."""

    data: Text
    inputs: int
    outputs: int
    counted: str = "word pieces"
    scores: tuple[str, ...] = ("test_accuracy", "test_perplexity", "test_log2_likelihood")

    def loss(self) -> keras.losses.Loss:
        return WordLoss()

    def metrics(self) -> list[keras.metrics.Metric]:
        return [WordAccuracy(name="accuracy")]

    def targets(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        return batches

    def scorer(self, model: keras.Model) -> Scorer:
        """Return a function that scores each piece's prediction from those before in its sequence.

        `test_accuracy` is the share of correct predictions, `test_perplexity` the perplexity of a
        piece, and `test_log2_likelihood` the negative bits a byte, so that more is better.
        """
        like = tf.TensorSpec([None, None], tf.int32)

        @tf.function(input_signature=[like, like])
        def count(pieces: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            logits = model(pieces, training=False)
            right, real = count_right(labels, logits)
            return tf.stack([right, real, real * WordLoss()(labels, logits)])

        def score(batches: tf.data.Dataset, gather: Gather) -> dict[str, float]:
            counts = sum((count(*batch).numpy() for batch in batches), np.zeros(3))
            right, real, nats = np.sum(gather(counts), axis=0)
            bits = nats / math.log(2) / self.data.test_bytes
            scores = right / real, np.exp(nats / real), -bits
            return dict(zip(self.scores, map(float, scores), strict=True))

        return score
