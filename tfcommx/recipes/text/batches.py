"""Batches of sentences of similar length with a fixed number of word pieces.

    lengths up to    8 |######|######|###          a global batch: as many sentences on every rank,
                    16     |#####|#####|##         padded to the same length
                    24        |####|####|.  dropped
    Sentences that do not fill a batch move to the next length; the last remainder is dropped.

The number of batches is the same in every epoch and on every rank, because it depends only on the
lengths. The sentences of each batch, and the order of the batches, change with the epoch.

**Source:** Vaswani et al., "Attention Is All You Need" (2017), section 5.1: batches by approximate
length, with about 25,000 words of each language.
"""

from dataclasses import dataclass

import numpy as np

from tfcommx.core import ConfigurationError


@dataclass(frozen=True)
class Batch:
    """The sentences of one step on one rank."""

    # Number of words to which each sentence is padded
    length: int
    # Numbers of the sentences, int64 [b]
    sentences: np.ndarray


def bounds(longest: int) -> list[int]:
    """Return the lengths to which batches are padded, each at least a quarter above the last.

    The longest may be closer to the one before. All others are multiples of 8, because these suit
    half precision.

    >>> bounds(60)
    [8, 16, 24, 32, 40, 56, 60]
    """
    lengths = [min(8, longest)]
    while lengths[-1] < longest:
        lengths.append(min(longest, -(-lengths[-1] * 5 // 4 // 8) * 8))
    return lengths


class LengthBatches:
    """The batches of every epoch, for all ranks.

    >>> lengths = np.array([3, 5, 8, 8, 9, 20])
    >>> batches = LengthBatches(lengths, words=24, longest=24, ranks=1, seed=0)
    >>> batches.steps
    4
    >>> sorted((batch.length, len(batch.sentences)) for batch in batches.epoch(0, 0))
    [(8, 3), (16, 1), (16, 1), (24, 1)]

    Args:
        lengths: integers [n], words of the longer side of each pair.
        words: words of a batch on one rank, including padding, >= longest.
        longest: largest length; pairs with more words are omitted.

    **Raises:** ConfigurationError if `words` is less than `longest`.
    """

    def __init__(
        self, lengths: np.ndarray, words: int, longest: int, ranks: int, seed: int
    ) -> None:
        if words < longest:
            raise ConfigurationError(
                f"A batch needs at least as many word pieces as its longest sentence, {longest}. "
                f"Received {words}. Raise the batch, or lower the phase's resolution."
            )
        self.ranks, self.seed = ranks, seed
        self.bounds = bounds(longest)
        # A pair above the longest bound gets the number of no bucket, and is omitted
        bucket = np.searchsorted(self.bounds, lengths)
        self.members = [np.flatnonzero(bucket == number) for number in range(len(self.bounds))]
        # Number of sentences of a global batch, by bucket
        self.sizes = [words // bound * ranks for bound in self.bounds]
        self.steps = 0
        # Counted as `epoch` cuts them, where the rest of a bucket joins the next one
        carried = 0
        for members, size in zip(self.members, self.sizes, strict=True):
            full, carried = divmod(len(members) + carried, size)
            self.steps += full

    def epoch(self, epoch: int, rank: int) -> list[Batch]:
        """Return the batches of a rank in an epoch, in order."""
        # All ranks draw the same numbers, and take different parts of each global batch
        random = np.random.default_rng([self.seed, epoch])
        batches: list[Batch] = []
        carried = np.zeros(0, np.int64)
        for length, members, size in zip(self.bounds, self.members, self.sizes, strict=True):
            # Shuffled together, because the carried ones would otherwise always lie in the first
            # batch
            pool = random.permutation(np.concatenate([carried, members]))
            full = len(pool) // size
            share = size // self.ranks
            for start in range(0, full * size, size):
                batches.append(Batch(length, pool[start + rank * share :][:share]))
            # The rest joins longer sentences, so that few are left out of an epoch
            carried = pool[full * size :]
        # Shuffled, because lengths ascend up to here, and training must not begin with the shortest
        return [batches[number] for number in random.permutation(len(batches))]


def in_order(lengths: np.ndarray, words: int, rank: int, ranks: int) -> list[Batch]:
    """Return a rank's share of all sentences, each once, shortest first: for evaluation.

    Args:
        lengths: integers [n], words of the longer side of each pair.
        words: largest number of words of a batch, including padding; a longer sentence is alone in
            its batch.
    """
    # Stable, because ranks must agree on the order of equal lengths. They take turns, so that each
    # has about as many words
    share = np.argsort(lengths, kind="stable")[rank::ranks]
    batches: list[Batch] = []
    start = 0
    while start < len(share):
        end = start + 1
        while end < len(share) and lengths[share[end]] * (end + 1 - start) <= words:
            end += 1
        batches.append(Batch(int(lengths[share[end - 1]]), share[start:end]))
        start = end
    return batches


def padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    """Return int32 [n, length]: rows of words, cut or padded with 0."""
    result = np.zeros((len(rows), length), np.int32)
    for row, words in zip(result, rows, strict=True):
        row[: min(length, len(words))] = words[:length]
    return result
