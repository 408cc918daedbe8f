"""Pairs of sentences, open on one rank."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import DataError
from tfcommx.data.pipeline import without_autotune
from tfcommx.data.sources.source import key_of
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.text.batches import Batch, LengthBatches, in_order, padded
from tfcommx.recipes.text.corpus import Corpus, Pairs, open_corpora
from tfcommx.recipes.text.vocabulary import BEGIN

WORDS = tf.TensorSpec([None, None], tf.int32)
# Number of words of each language whose digest the ranks compare
DIGESTED = 1_000_000
INPUTS = {"source": WORDS, "target": WORDS}


class SentencePairs:
    """Training and test pairs of two languages, as numbers of word pieces.

    A batch is ({"source": int32 [b, words], "target": ...}, labels). The target is the labels
    shifted by one word, with BEGIN first. Source and labels end with END; padding is 0.

    Args:
        train: pairs for training, from which the vocabulary is learnt.
        size: largest size of the vocabulary.
        folder: folder of the vocabulary and the encoded pairs.

    **Ranks:** every rank creates one; the ranks of a node wait for the first one there, which
    encodes.
    """

    redistributes = False

    def __init__(self, train: Pairs, test: Pairs, size: int, folder: Path, place: DataRank) -> None:
        self.vocabulary, self.corpus, self.tests = open_corpora(train, test, size, folder)
        # Original texts, because BLEU compares texts and not word pieces
        self.references = [translation for _, translation in test]
        self.classes = self.vocabulary.words
        self.inputs, self.count, self.place = self.vocabulary.size, len(self.corpus.source), place
        self.contents = {
            "training pairs": _described(self.corpus),
            "test pairs": _described(self.tests),
            "vocabulary": f"{self.inputs} word pieces ({key_of(self.classes)[:8]})",
        }
        # (batch, resolution) -> batches, kept because sorting millions of pairs takes seconds
        self._batches: dict[tuple[int, int], LengthBatches] = {}

    def batches(self, batch: int, resolution: int) -> LengthBatches:
        """Return the batches of all ranks, of `batch` word pieces each.

        **Raises:** DataError if the pairs fill no batch. A warning counts long pairs if they are
        more than a tenth.
        """
        if (batch, resolution) not in self._batches:
            place, lengths = self.place, _lengths(self.corpus)
            batches = LengthBatches(lengths, batch, resolution, place.topology.size, place.seed)
            omitted = int(np.count_nonzero(lengths > resolution))
            counts = (
                f"{omitted:,} of {len(lengths):,} training pairs have more than the phase's "
                f"resolution={resolution} word pieces"
            )
            if batches.steps == 0:
                raise DataError(
                    f"Training pairs that fill a batch are required: {counts}, and the others do "
                    f"not fill batch={batch} on {place.topology.size} ranks. Raise the "
                    "resolution, or lower the batch."
                )
            if omitted > len(lengths) / 10:
                warnings.warn(f"{counts}, and are left out.", stacklevel=2)
            self._batches[batch, resolution] = batches
        return self._batches[batch, resolution]

    def steps(self, batch: int, resolution: int) -> int:
        return self.batches(batch, resolution).steps

    def train(self, batch: int, resolution: int, epochs: range, step: int = 0) -> tf.data.Dataset:
        """Return the training batches of some epochs, from step `step` of the first epoch."""
        batches = self.batches(batch, resolution)

        def served() -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
            for epoch in epochs:
                rank_batches = batches.epoch(epoch, self.place.rank)
                # A resumed run may begin within its first epoch, and no other epoch is cut
                for rank_batch in rank_batches[step if epoch == epochs.start else 0 :]:
                    yield _example(self.corpus, rank_batch)

        count = len(epochs) * batches.steps - step
        return _dataset(served, (INPUTS, WORDS), count)

    def test(self, batch: int, resolution: int) -> tf.data.Dataset:
        """Return this rank's share of the test pairs, shortest first.

        Sentences longer than `resolution` are not cut. Labels are (words int32 [b, words], numbers
        of the pairs int64 [b]); `references` has the translations.
        """
        topology = self.place.topology
        rank_batches = in_order(_lengths(self.tests), batch, self.place.rank, topology.size)

        def served() -> Iterator[Any]:
            for rank_batch in rank_batches:
                inputs, labels = _example(self.tests, rank_batch)
                yield inputs, (labels, rank_batch.sentences)

        numbers = tf.TensorSpec([None], tf.int64)
        return _dataset(served, (INPUTS, (WORDS, numbers)), len(rank_batches))

    def redistribute(self, epoch: int, comm: Comm) -> None:
        """Do nothing, because every rank has all pairs."""

    def report(self, epoch: int) -> dict[str, float]:
        """Return no statistics, because the pairs are in memory."""
        return {}

    def close(self) -> None:
        """Do nothing, because the next run uses the files again."""


def _described(corpus: Corpus) -> str:
    """Return the numbers of pairs and words, and the start of a digest."""
    sides = corpus.source, corpus.target
    # Not of all words, because these have many times more bytes than the lengths, which missing,
    # added or reordered pairs change already
    digest = key_of(
        part.tobytes() for side in sides for part in (side.starts, side.words[:DIGESTED])
    )
    words = sum(int(side.starts[-1]) for side in sides)
    return f"{len(corpus.source)} pairs of {words} words ({digest[:8]})"


def _lengths(corpus: Corpus) -> np.ndarray:
    """Return the words of each pair's longer side."""
    longer: np.ndarray = np.maximum(corpus.source.lengths, corpus.target.lengths)
    return longer


def _example(corpus: Corpus, batch: Batch) -> tuple[dict[str, np.ndarray], np.ndarray]:
    source = padded([corpus.source[n] for n in batch.sentences], batch.length)
    labels = padded([corpus.target[n] for n in batch.sentences], batch.length)
    # Input of the decoder: at each position the word before the label
    target = np.concatenate([np.full((len(labels), 1), BEGIN, np.int32), labels[:, :-1]], axis=1)
    return {"source": source, "target": target}, labels


def _dataset(served: Any, signature: Any, count: int) -> tf.data.Dataset:
    batches = tf.data.Dataset.from_generator(served, output_signature=signature)
    # A generator has no length, without which BroadcastState cannot compare steps
    with_length = tf.data.experimental.assert_cardinality(count)
    return without_autotune(batches.apply(with_length).prefetch(8))
