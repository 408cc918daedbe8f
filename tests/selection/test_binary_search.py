"""Rule `binary_search` is Algorithm 1 of CommLib's paper; `mstopk` differs as documented."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from vectors import make

from tfcommx import selection
from tfcommx.kernels.select import below
from tfcommx.selection.rules import BinarySearch


class Printed(NamedTuple):
    indices: list[int]
    # Entries that are chosen for their magnitude, and those of which the rest is a run
    above: int
    band: int


def printed(x: np.ndarray, k: int, searches: int, seed: int) -> Printed:
    """Follow Algorithm 1 line by line; its random number is the rule's."""
    a = np.abs(x.astype(np.float64))
    mean, u = a.mean(), a.max()
    low, high = 0.0, 1.0
    k1, k2 = 0, len(x)
    thres1 = thres2 = 0.0
    for _ in range(searches):
        ratio = low + (high - low) / 2
        thres = mean + ratio * (u - mean)
        nnz = np.count_nonzero(a >= thres)
        if nnz <= k:
            high = ratio
            if nnz > k1:
                k1, thres1 = nnz, thres
        else:
            low = ratio
            if nnz < k2:
                k2, thres2 = nnz, thres
    first = np.flatnonzero(a >= thres1)
    second = np.flatnonzero((a < thres1) & (a >= thres2))
    start = int(below(seed, tf.constant(max(1, len(second) - (k - k1) + 1))))
    chosen = [*first, *second[start : start + k - k1]]
    return Printed(sorted(chosen), len(first), len(second))


@pytest.mark.parametrize("searches", [1, 2, 3, 5, 8, 30])
@pytest.mark.parametrize("kind", ["normal", "laplace", "ties", "sparse"])
def test_it_is_the_printed_algorithm(kind: str, searches: int) -> None:
    x = make(kind, 3000, 1)
    bands = []
    for k in (1, 30, 200, 900, 2000):
        for seed in (0, 1):
            expected = printed(x, k, searches, seed)
            # Otherwise the printed one takes everything, because no threshold was low enough
            if 0 < expected.above <= k:
                chosen = BinarySearch(searches).select(tf.constant(x), k, seed)
                assert chosen.indices.numpy().tolist() == expected.indices
                np.testing.assert_array_equal(chosen.values, x[expected.indices])
                bands.append(expected.band)
    assert len(bands) >= 4 and max(bands) > 0


@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_thirty_thresholds_find_the_largest(kind: str) -> None:
    """The gaps between these magnitudes are wider than the band, (largest - mean) / 2^30."""
    x = tf.constant(make(kind, 10_000, 2))
    for k in (1, 10, 100, 1000):
        largest = selection.rule("exact").select(x, k).indices
        found = selection.rule("binary_search").select(x, k, seed=3).indices
        np.testing.assert_array_equal(found, largest)


def test_an_entry_that_equals_a_threshold_reaches_it() -> None:
    """The mean is 1, so the first threshold is 2.5: two entries reach it, and one is drawn."""
    x = tf.constant([4.0, 2.5, *[0.25] * 6])
    chosen = {int(BinarySearch(1).select(x, 1, seed).indices[0]) for seed in range(20)}
    assert chosen == {0, 1}


def test_equal_magnitudes_give_a_run_of_k() -> None:
    """The printed algorithm takes all of them: its upper threshold stays 0."""
    x = np.full(100, -2.0, np.float32)
    assert len(printed(x, 7, 30, 0).indices) == 100
    starts = set()
    for seed in range(20):
        indices = selection.rule("binary_search").select(tf.constant(x), 7, seed).indices.numpy()
        assert indices.tolist() == list(range(indices[0], indices[0] + 7))
        starts.add(int(indices[0]))
    assert len(starts) > 5


def test_below_the_mean_mstopk_alone_takes_the_largest() -> None:
    """42 % of normal magnitudes exceed their mean; the search knows no threshold below it."""
    x = make("normal", 10_000, 3)
    largest = np.abs(x[selection.rule("exact").select(tf.constant(x), 8000).indices]).sum()
    shares = [
        np.abs(selection.rule(name).select(tf.constant(x), 8000, 5).values).sum() / largest
        for name in ("mstopk", "binary_search")
    ]
    assert shares[0] > 0.999 and 0.9 < shares[1] < 0.99
