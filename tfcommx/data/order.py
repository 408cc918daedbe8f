"""The order of samples: which rank serves which, and when; pure functions of (seed, epoch).

    all samples --part--> a node's samples --share--> a rank's samples, shuffled --batches--> its
    batches

Every sample is in exactly one node's part, one rank's share and, unless the remainder is dropped,
one batch of an epoch. The order does not depend on timing: nothing here reads a clock, a file or
another rank, so that resuming at (epoch, step) needs no saved state.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading

import numpy as np

from tfcommx.core import Topology
from tfcommx.kernels.draws import draws

# Streams of random numbers that must not coincide.
_PART, _OFFER, _POOL, _SHUFFLE = range(4)
# Epochs whose parts are kept, besides the first: one that is served, one that is loaded ahead, and
# the one before a reshuffle.
EPOCHS_KEPT = 3
_lock = threading.Lock()


def shuffled(samples: np.ndarray, *stream: int) -> np.ndarray:
    """Return the samples, int64 [n], in an order that depends on their set and `stream` alone."""
    samples = np.sort(samples)
    return samples[np.argsort(draws(*stream, of=samples), kind="stable")]


def _cut(samples: np.ndarray, weights: tuple[int, ...]) -> list[np.ndarray]:
    """Cut an array into consecutive pieces in proportion to the weights.

    Lengths per weight differ by one at most.
    """
    ends = np.cumsum(weights)
    bounds = [0, *(len(samples) * ends // ends[-1])]
    return [samples[low:high] for low, high in itertools.pairwise(bounds)]


@functools.lru_cache(maxsize=4)
def _known(
    count: int, slots: tuple[int, ...], seed: int, fraction: float
) -> dict[int, tuple[np.ndarray, ...]]:
    """Return epoch -> parts: of the first, and of those that `parts` has been asked for last."""
    return {
        0: tuple(np.sort(piece) for piece in _cut(shuffled(np.arange(count), seed, _PART), slots))
    }


def parts(
    count: int, slots: tuple[int, ...], seed: int, epoch: int = 0, fraction: float = 0.0
) -> tuple[np.ndarray, ...]:
    """Return each node's part of the samples 0 to count - 1 in `epoch`.

    Args:
        count: samples of the data set, >= 0.
        slots: ranks on each node; parts are in proportion.
        seed: in [0, 2^63).
        epoch: >= 0.
        fraction: share of each part, in [0, 1], that is redistributed before every epoch except the
            first. The offered samples of all nodes are shuffled together, so that some come back:
            the expected move is fraction * (1 - 1 / nodes).

    Returns:
        One int64 array per node, ascending.

    **Ranks:** pure; equal arguments give equal parts everywhere.
    **Cost:** one sort of `count` numbers; with a fraction, one per epoch since the newest of those
    before that is known.
    """
    if fraction == 0 or len(slots) == 1:
        epoch, fraction = 0, 0.0
    with _lock:
        known = _known(count, slots, seed, fraction)
        newest = max(number for number in known if number <= epoch)
        for number in range(newest + 1, epoch + 1):
            known[number] = _redistributed(known[number - 1], seed, number, fraction)
            # The first epoch stays: all others are made from it.
            for old in list(known)[1:-EPOCHS_KEPT]:
                del known[old]
        return known[epoch]


def _redistributed(
    before: tuple[np.ndarray, ...], seed: int, epoch: int, fraction: float
) -> tuple[np.ndarray, ...]:
    """Return the parts of `epoch`, made of those of the epoch before."""
    offers = [shuffled(part, seed, _OFFER, epoch)[: round(fraction * len(part))] for part in before]
    pool = shuffled(np.concatenate(offers), seed, _POOL, epoch)
    received = np.split(pool, np.cumsum([len(offer) for offer in offers])[:-1])
    kept = [
        np.setdiff1d(part, offer, assume_unique=True)
        for part, offer in zip(before, offers, strict=True)
    ]
    return tuple(np.sort(np.concatenate(pair)) for pair in zip(kept, received, strict=True))


def share(
    count: int,
    topology: Topology,
    rank: int,
    seed: int,
    epoch: int,
    fraction: float = 0.0,
    shuffle: bool = True,
) -> np.ndarray:
    """Return int64 [n]: the samples of a rank in an epoch, in order.

    Lengths differ by one at most between ranks.
    """
    node, slot = topology.position_of(rank)
    slots = topology.slots_by_node
    part = parts(count, slots, seed, epoch, fraction)[node]
    return _cut(shuffled(part, seed, _SHUFFLE, epoch) if shuffle else part, (1,) * slots[node])[
        slot
    ]


def steps(count: int, topology: Topology, batch: int, drop: bool) -> int:
    """Return the batches of an epoch, the same on every rank; with `drop`, of full ones only.

    >>> steps(100, Topology(1, 2), 16, drop=True), steps(100, Topology(1, 2), 16, drop=False)
    (3, 4)
    """
    if drop:
        return count // topology.size // batch
    return math.ceil(math.ceil(count / topology.size) / batch)


def batch_bounds(length: int, batch: int, count: int) -> np.ndarray:
    """Return int64 [count + 1]: where the batches of a share begin and end.

    Batches are full. If the remainder is kept, the last one is smaller, but not empty: it borrows
    from the one before, because all ranks take `count` steps. Only a share with fewer samples than
    steps (a batch of 1, an almost empty data set) gives empty ones.

    >>> batch_bounds(17, 8, 3).tolist(), batch_bounds(16, 8, 3).tolist()
    ([0, 8, 16, 17], [0, 8, 15, 16])

    Args:
        length: samples of the share.
        batch: samples of a full batch.
        count: batches.
    """
    ends = [0]
    for later in range(count - 1, -1, -1):  # Steps after this one
        remaining = length - ends[-1]
        ends.append(ends[-1] + max(0, min(batch, remaining - later, remaining)))
    return np.array(ends, np.int64)
