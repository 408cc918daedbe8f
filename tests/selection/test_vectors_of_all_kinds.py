"""Every rule takes a vector as a user has it, and refuses anything else by its shape."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfcommx import selection
from tfcommx.core import PlanError
from tfcommx.selection.rules import Threshold

VECTOR = np.random.default_rng(1).normal(size=50)


@pytest.mark.parametrize("name", selection.RULES)
def test_arrays_of_float64_and_lists_are_taken_as_float32(name: str) -> None:
    """`exact` and `mstopk` failed with NumPy's default dtype, and all rules with a list."""
    k, rule = 50 if name == "all" else 7, selection.rule(name)
    expected = rule.select(tf.constant(VECTOR, tf.float32), k, seed=3)
    for vector in (VECTOR, VECTOR.tolist(), tf.constant(VECTOR)):
        residual = tf.Variable(tf.zeros(50))
        for chosen in (
            rule.select(vector, k, seed=3),
            rule.select_with_residual(vector, residual, k, seed=3),
        ):
            np.testing.assert_array_equal(chosen.indices, expected.indices)
            np.testing.assert_array_equal(chosen.values, expected.values)
            assert chosen.values.dtype == tf.float32 and chosen.size == 50


@pytest.mark.parametrize("name", selection.RULES)
def test_of_an_empty_vector_nothing_is_chosen(name: str) -> None:
    assert selection.rule(name).select(tf.zeros([0]), 0).indices.shape == (0,)


@pytest.mark.parametrize("shape", [(), (5, 10)])
@pytest.mark.parametrize("name", selection.RULES)
def test_what_is_no_vector_is_refused(name: str, shape: tuple[int, ...]) -> None:
    """Of a matrix, `threshold` chose the numbers of rows."""
    rule, residual = selection.rule(name), tf.Variable(tf.zeros(shape))
    for choose in (
        lambda: rule.select(tf.ones(shape), 1),
        lambda: rule.select_with_residual(tf.ones(shape), residual, 1),
    ):
        with pytest.raises(PlanError, match=r"vector.*\(" + ", ".join(map(str, shape))):
            choose()


@pytest.mark.parametrize("threshold", [0.5, 5.0])
def test_few_entries_that_reach_a_threshold_are_chosen_once(threshold: float) -> None:
    """An entry that was chosen twice would be added twice."""
    reaching = np.flatnonzero(np.abs(VECTOR) >= threshold)
    chosen = Threshold(threshold).select(VECTOR, 45, seed=3).indices.numpy()
    assert len(set(chosen)) == 45 and set(reaching) <= set(chosen)


@pytest.mark.parametrize(("k", "error"), [(49, PlanError), (tf.constant(49), tf.errors.OpError)])
def test_the_rule_all_is_refused_fewer_entries(k: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="k = n"):
        selection.rule("all").select(VECTOR, k)
