"""The order of samples over nodes, ranks and batches: pure functions of (seed, epoch).

    all samples --part--> a node's samples --share--> a rank's samples, shuffled --batches--> its
    batches

Every sample is in exactly one node's part, one rank's share and, unless the remainder is dropped,
one batch of an epoch. Resuming at (epoch, step) needs no saved state, because the order does not
depend on timing: nothing here reads a clock, a file or another rank.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

from tfcommx.core import Topology
from tfcommx.kernels.draws import draws

# Streams of random numbers, which must differ
_PART, _SHUFFLE = 0, 3


def shuffled(samples: np.ndarray, *stream: int) -> np.ndarray:
    """Return the samples, int64 [n], in an order that depends only on their set and `stream`."""
    samples = np.sort(samples)
    return samples[np.argsort(draws(*stream, of=samples), kind="stable")]


def _cut(samples: np.ndarray, weights: tuple[int, ...]) -> list[np.ndarray]:
    """Cut an array into consecutive pieces in proportion to the weights.

    Lengths per unit of weight differ by at most one.
    """
    ends = np.cumsum(weights)
    bounds = [0, *(len(samples) * ends // ends[-1])]
    return [samples[low:high] for low, high in itertools.pairwise(bounds)]


@functools.lru_cache(maxsize=4)
def parts(count: int, slots: tuple[int, ...], seed: int) -> tuple[np.ndarray, ...]:
    """Return each node's part of the samples 0 to count - 1, the same in all epochs.

    Args:
        count: number of samples of the data set, >= 0.
        slots: number of ranks on each node; parts are in proportion.
        seed: seed of the parts, in [0, 2^63).

    Returns:
        One int64 array per node, ascending.

    **Ranks:** pure; equal arguments give equal parts everywhere.
    **Cost:** one sort of `count` numbers.
    """
    return tuple(np.sort(piece) for piece in _cut(shuffled(np.arange(count), seed, _PART), slots))


def share(
    count: int,
    topology: Topology,
    rank: int,
    seed: int,
    epoch: int,
    shuffle: bool = True,
) -> np.ndarray:
    """Return the samples of a rank in an epoch, in order, int64 [n].

    Lengths differ by at most one between ranks.
    """
    node, slot = topology.position_of(rank)
    slots = topology.slots_by_node
    part = parts(count, slots, seed)[node]
    return _cut(shuffled(part, seed, _SHUFFLE, epoch) if shuffle else part, (1,) * slots[node])[
        slot
    ]


def steps(count: int, topology: Topology, batch: int, drop: bool) -> int:
    """Return the number of batches of an epoch on every rank; with `drop`, full ones only.

    >>> steps(100, Topology(1, 2), 16, drop=True), steps(100, Topology(1, 2), 16, drop=False)
    (3, 4)
    """
    if drop:
        return count // topology.size // batch
    return math.ceil(math.ceil(count / topology.size) / batch)


def batch_bounds(length: int, batch: int, count: int) -> np.ndarray:
    """Return the starts of the batches of a share and the end of the last, int64 [count + 1].

    Batches are full. If the remainder is kept, the last one is smaller, but not empty: it borrows
    from the one before, because all ranks take `count` steps. Only a share with fewer samples than
    steps (a batch of 1, an almost empty data set) has empty ones.

    >>> batch_bounds(17, 8, 3).tolist(), batch_bounds(16, 8, 3).tolist()
    ([0, 8, 16, 17], [0, 8, 15, 16])

    Args:
        length: number of samples of the share.
        batch: number of samples of a full batch.
        count: number of batches.
    """
    ends = [0]
    for later in range(count - 1, -1, -1):  # Number of steps after this one
        remaining = length - ends[-1]
        ends.append(ends[-1] + max(0, min(batch, remaining - later, remaining)))
    return np.array(ends, np.int64)
