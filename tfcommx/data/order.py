"""The order of samples over nodes, ranks and batches: pure functions of (seed, epoch).

    all samples --part--> a node's samples --share--> a rank's samples, shuffled --batches--> its
    batches

Every sample is in exactly one node's part, one rank's share and, unless the remainder is dropped,
one batch of an epoch. Resuming at (epoch, step) needs no saved state, because the order does not
depend on timing: nothing here reads a clock, a file or another rank.
"""

import functools
import itertools
import math
import threading

import numpy as np

from tfcommx.core import Topology
from tfcommx.kernels.draws import draws

# Streams of random numbers, which must differ
_PART, _OFFER, _POOL, _SHUFFLE = range(4)
# Number of epochs whose parts are kept, besides the first: the served one, the one that is loaded
# ahead, and the one before a reshuffle
EPOCHS_KEPT = 3
# TensorFlow's threads and the training thread ask for parts, and change one cached dictionary
_lock = threading.Lock()


def shuffled(samples: np.ndarray, *stream: int) -> np.ndarray:
    """Return the samples, int64 [n], in an order that depends only on their set and `stream`."""
    # Sorted first, because the order of the argument must not count
    samples = np.sort(samples)
    # Stable, so that equal draws leave the same order on every machine
    return samples[np.argsort(draws(*stream, of=samples), kind="stable")]


def _cut(samples: np.ndarray, weights: tuple[int, ...]) -> list[np.ndarray]:
    """Cut an array into consecutive pieces in proportion to the weights, to within one a unit."""
    # Rounded after the sum and not before, so that no sample is left over
    ends = np.cumsum(weights)
    bounds = [0, *(len(samples) * ends // ends[-1])]
    return [samples[low:high] for low, high in itertools.pairwise(bounds)]


@functools.lru_cache(maxsize=4)
def _known(
    count: int, slots: tuple[int, ...], seed: int, fraction: float
) -> dict[int, tuple[np.ndarray, ...]]:
    """Return epoch -> parts: at first of epoch 0; `parts` adds the epochs requested last."""
    return {
        0: tuple(np.sort(piece) for piece in _cut(shuffled(np.arange(count), seed, _PART), slots))
    }


def parts(
    count: int, slots: tuple[int, ...], seed: int, epoch: int = 0, fraction: float = 0.0
) -> tuple[np.ndarray, ...]:
    """Return each node's part of the samples 0 to count - 1 in `epoch`, int64, ascending.

    Args:
        count: number of samples of the data set, >= 0.
        slots: number of ranks on each node; parts are in proportion.
        seed: seed of the parts, in [0, 2^63).
        epoch: number of the epoch, >= 0.
        fraction: share of each part, in [0, 1], that is redistributed before every epoch except the
            first. The expected share that moves is fraction * (1 - 1 / nodes), because the offered
            samples of all nodes are shuffled together, and some return to their node.

    **Ranks:** pure; equal arguments give equal parts everywhere.
    **Cost:** one sort of `count` numbers; with a fraction, one for each epoch since the newest
    earlier one whose parts are kept.
    """
    if fraction == 0 or len(slots) == 1:
        epoch, fraction = 0, 0.0
    with _lock:
        by_epoch = _known(count, slots, seed, fraction)
        newest = max(number for number in by_epoch if number <= epoch)
        for number in range(newest + 1, epoch + 1):
            by_epoch[number] = _redistributed(by_epoch[number - 1], seed, number, fraction)
            # The first epoch stays, because all others are made from it
            for old in list(by_epoch)[1:-EPOCHS_KEPT]:
                del by_epoch[old]
        return by_epoch[epoch]


def _redistributed(
    before: tuple[np.ndarray, ...], seed: int, epoch: int, fraction: float
) -> tuple[np.ndarray, ...]:
    offers = [shuffled(part, seed, _OFFER, epoch)[: round(fraction * len(part))] for part in before]
    pool = shuffled(np.concatenate(offers), seed, _POOL, epoch)
    received = np.split(pool, np.cumsum([len(offer) for offer in offers])[:-1])
    retained = [
        np.setdiff1d(part, offer, assume_unique=True)
        for part, offer in zip(before, offers, strict=True)
    ]
    return tuple(np.sort(np.concatenate(pair)) for pair in zip(retained, received, strict=True))


def share(
    count: int,
    topology: Topology,
    rank: int,
    seed: int,
    epoch: int,
    fraction: float = 0.0,
    shuffle: bool = True,
) -> np.ndarray:
    """Return the samples of a rank in an epoch, in order, int64 [n].

    Lengths differ by at most one between ranks.
    """
    node, slot = topology.position_of(rank)
    slots = topology.slots_by_node
    part = parts(count, slots, seed, epoch, fraction)[node]
    part = shuffled(part, seed, _SHUFFLE, epoch) if shuffle else part
    return _cut(part, (1,) * slots[node])[slot]


def steps(count: int, topology: Topology, batch: int, drop: bool) -> int:
    """Return the number of batches of an epoch on every rank; with `drop`, full ones only.

    >>> steps(100, Topology(1, 2), 16, drop=True), steps(100, Topology(1, 2), 16, drop=False)
    (3, 4)
    """
    # All ranks take the steps of the one with the fewest samples: each step is a collective
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
    """
    ends = [0]
    for later in range(count - 1, -1, -1):  # Number of steps after this one
        remaining = length - ends[-1]
        ends.append(ends[-1] + max(0, min(batch, remaining - later, remaining)))
    return np.array(ends, np.int64)
