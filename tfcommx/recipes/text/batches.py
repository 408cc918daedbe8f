"""Batches of sentences of similar length with a fixed number of word pieces.

    lengths up to    8 |######|######|###          a global batch: as many sentences on every rank,
                    16     |#####|#####|##         padded to the same length
                    24        |####|####|.  dropped
    What does not fill a batch moves to the next length; the last remainder is dropped.

The number of batches depends on the lengths only: it is the same in every epoch and on every rank.
Which sentences share a batch, and the order of the batches, change with the epoch.

**Source:** Vaswani et al., "Attention Is All You Need" (2017), section 5.1: batches by approximate
length, with about 25,000 words of each language.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfcommx.core import ConfigurationError


@dataclass(frozen=True)
class Batch:
    """The sentences of one step on one rank."""

    # Padded to it, words
    length: int
    # int64 [b], their numbers
    sentences: np.ndarray


def bounds(longest: int) -> list[int]:
    """Return the lengths to which batches are padded, each at least a quarter above the last.

    All but the longest are multiples of 8, which suit half precision.

    >>> bounds(60)
    [8, 16, 24, 32, 40, 56, 60]
    """
    found = [min(8, longest)]
    while found[-1] < longest:
        found.append(min(longest, -(-found[-1] * 5 // 4 // 8) * 8 or 8))
    return found


class LengthBatches:
    """The batches of every epoch, for all ranks.

    >>> lengths = np.array([3, 5, 8, 8, 9, 20])
    >>> batches = LengthBatches(lengths, words=24, longest=24, ranks=1, seed=0)
    >>> batches.steps
    4
    >>> sorted((batch.length, len(batch.sentences)) for batch in batches.epoch(0, 0))
    [(8, 3), (16, 1), (16, 1), (24, 1)]

    Args:
        lengths: whole numbers [n], words of the longer side of each pair.
        words: of a batch on one rank, padding included, >= longest.
        longest: pairs with more words are left out.
        ranks: >= 1.
        seed: of the order.

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
        bucket = np.searchsorted(self.bounds, lengths)
        self.members = [np.flatnonzero(bucket == number) for number in range(len(self.bounds))]
        # Sentences of a global batch of each bucket
        self.sizes = [words // bound * ranks for bound in self.bounds]
        self.steps = 0
        carried = 0
        for members, size in zip(self.members, self.sizes, strict=True):
            whole, carried = divmod(len(members) + carried, size)
            self.steps += whole

    def epoch(self, epoch: int, rank: int) -> list[Batch]:
        """Return the batches of a rank in an epoch, in order."""
        random = np.random.default_rng([self.seed, epoch])
        found: list[Batch] = []
        carried = np.zeros(0, np.int64)
        for length, members, size in zip(self.bounds, self.members, self.sizes, strict=True):
            pool = random.permutation(np.concatenate([carried, members]))
            whole = len(pool) // size
            mine = size // self.ranks
            for start in range(0, whole * size, size):
                found.append(Batch(length, pool[start + rank * mine :][:mine]))
            carried = pool[whole * size :]
        return [found[number] for number in random.permutation(len(found))]


def in_order(lengths: np.ndarray, words: int, rank: int, ranks: int) -> list[Batch]:
    """Return a rank's share of all sentences, each once, shortest first: for evaluation.

    Args:
        lengths: whole numbers [n], of the longer side of each pair.
        words: of a batch, padding included; a longer sentence gets a batch of its own.
        rank: in [0, ranks).
        ranks: >= 1.
    """
    mine = np.argsort(lengths, kind="stable")[rank::ranks]
    found: list[Batch] = []
    start = 0
    while start < len(mine):
        end = start + 1
        while end < len(mine) and lengths[mine[end]] * (end + 1 - start) <= words:
            end += 1
        found.append(Batch(int(lengths[mine[end - 1]]), mine[start:end]))
        start = end
    return found


def padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    """Return int32 [n, length]: rows of words, cut or filled with 0."""
    found = np.zeros((len(rows), length), np.int32)
    for row, words in zip(found, rows, strict=True):
        row[: min(length, len(words))] = words[:length]
    return found
