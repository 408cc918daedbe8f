"""Laws of the merge: list order, whatever the threads, and no index outside."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfcommx.kernels.sparse import merge, merge_definition

IMPLEMENTATIONS = {"native": merge, "definition": merge_definition}


def in_order(indices, values, size):
    """The definition: one float32 addition after the other."""
    dense = np.zeros(size, np.float32)
    np.add.at(dense, indices, values)
    return dense


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(size=st.integers(1, 3000), pairs=st.integers(0, 5000), seed=st.integers(0, 2**31))
def test_adds_in_the_order_of_the_list(implementation, size, pairs, seed):
    random = np.random.default_rng(seed)
    indices = random.integers(0, size, pairs).astype(np.int32)
    values = (random.standard_normal(pairs) * 10.0 ** random.integers(-3, 4, pairs)).astype(
        np.float32
    )
    dense = IMPLEMENTATIONS[implementation](tf.constant(indices), tf.constant(values), size).numpy()
    np.testing.assert_array_equal(dense, in_order(indices, values, size))


def test_large_vectors_are_shared_among_threads_in_order():
    random = np.random.default_rng(1)
    size, pairs = 3_000_001, 400_000
    indices = random.integers(0, size // 50, pairs).astype(np.int32) * 50
    values = random.standard_normal(pairs).astype(np.float32)
    dense = merge(tf.constant(indices), tf.constant(values), size).numpy()
    np.testing.assert_array_equal(dense, in_order(indices, values, size))


@pytest.mark.parametrize("ascending", [True, False])
def test_runs_are_cut_into_the_stretches_of_threads(ascending):
    """Three ranks' runs with entries at the ends of every stretch."""
    random = np.random.default_rng(2)
    size, k = 3_000_001, 50_000
    ends = [size * turn // 11 + off for turn in range(12) for off in (-1, 0)][1:-1]
    runs = [np.union1d(ends, random.choice(size, k + 9, replace=False))[: k - 1] for _ in range(3)]
    runs = [np.append(run, size - 1).astype(np.int32) for run in runs]
    if not ascending:
        random.shuffle(runs[1])
    indices = np.concatenate(runs)
    values = random.standard_normal(3 * k).astype(np.float32)
    dense = merge(tf.constant(indices), tf.constant(values), size, k).numpy()
    np.testing.assert_array_equal(dense, in_order(indices, values, size))


@pytest.mark.parametrize("indices", [[0, 5, 3, 10], [0, 5, -1, 3], [0, 10, 9, 3]])
def test_an_index_outside_of_ascending_runs_is_refused(indices):
    place = next(i for i, index in enumerate(indices) if not 0 <= index < 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f" {indices[place]} .* {place} "):
        merge(tf.constant(indices), tf.ones(4), 10, 2)


def test_not_finite_values_arrive():
    dense = merge(tf.constant([2, 2, 0]), tf.constant([1.0, np.nan, np.inf]), 4).numpy()
    np.testing.assert_array_equal(dense, [np.inf, 0, np.nan, 0])


@pytest.mark.parametrize("index", [-1, 10, 2**31 - 1])
def test_an_index_outside_is_refused(index):
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"\[0, 10\).* {index} .* 1 "):
        merge(tf.constant([3, index, 4]), tf.ones(3), 10)


def test_runs_of_k_pairs_merge_alike_and_a_broken_run_is_refused():
    indices, values = tf.constant([0, 3, 1, 3]), tf.constant([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(merge(indices, values, 4, k=2), merge(indices, values, 4))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`k`.*\b4\b.*k=3\b"):
        merge(indices, values, 4, k=3)


def test_unequal_lengths_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2\].*\[3\]"):
        merge(tf.constant([3, 4]), tf.ones(3), 10)


def test_static_shape_inside_a_function():
    @tf.function
    def merged(values):
        dense = merge(tf.constant([1, 1]), values, 5)
        assert dense.shape == (5,)
        return dense

    np.testing.assert_array_equal(merged(tf.constant([1.0, 2.0])), [0, 3, 0, 0, 0])
