"""Error feedback does what it is for, and what is wrapped around a rule keeps to its definition."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from tfcommx import residual, selection
from tfcommx.terms import PlanError


def distance_to_the_solution(rule: str, density: float, feedback: bool) -> float:
    """Descend a least-squares problem whose 8 ranks disagree; return the distance to the dense solution, relative."""
    ranks, n = 8, 40
    random = np.random.default_rng(0)
    matrices = random.standard_normal((ranks, 60, n)).astype(np.float32) / 60**0.5
    targets = random.standard_normal((ranks, 60)).astype(np.float32) * 3  # no common solution: local gradients never vanish
    best = np.linalg.lstsq(matrices.reshape(-1, n), targets.reshape(-1), rcond=None)[0]
    module, k = selection.rule(rule), max(1, int(density * n))
    kept = [tf.Variable(tf.zeros(n)) for _ in range(ranks)]
    x = np.zeros(n, np.float32)
    for step in range(1000):
        total = np.zeros(n, np.float32)
        for rank in range(ranks):
            gradient = tf.constant(matrices[rank].T @ (matrices[rank] @ x - targets[rank]))
            choose = functools.partial(module.select_with_residual, gradient, kept[rank]) if feedback else functools.partial(
                module.select, gradient)
            sent = choose(k, step)
            np.add.at(total, sent.indices.numpy(), sent.values.numpy())
        x = x - 0.5 / (1 + step / 30) * total / ranks
    return float(np.linalg.norm(x - best) / np.linalg.norm(best))


@pytest.mark.parametrize("rule", ["exact", "mstopk"])
def test_with_feedback_ranks_that_disagree_reach_the_dense_solution_and_without_they_do_not(rule):
    assert distance_to_the_solution(rule, 0.05, feedback=True) < 0.1
    assert distance_to_the_solution(rule, 0.05, feedback=False) > 0.3


def test_momentum_correction_is_its_definition():
    random = np.random.default_rng(1)
    u, v = np.zeros(50, np.float32), np.zeros(50, np.float32)
    velocity, kept = tf.Variable(u), tf.Variable(v)
    rule = selection.rule("exact").select_with_residual
    for step in range(20):
        g = random.standard_normal(50).astype(np.float32)
        u = np.float32(0.9) * u + g
        v = v + u
        chosen = residual.select_with_momentum(rule, tf.constant(g), velocity, kept, 5, step)
        np.testing.assert_allclose(chosen.values, v[chosen.indices.numpy()], rtol=1e-5)
        u[chosen.indices.numpy()] = v[chosen.indices.numpy()] = 0
        np.testing.assert_allclose(velocity, u, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(kept, v, rtol=1e-5, atol=1e-6)


def test_momentum_correction_keeps_nan_out_of_its_state():
    velocity, kept = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([0.0, 0.0, 5.0])
    gradient = tf.constant([np.nan, 0.0, np.inf])
    chosen = residual.select_with_momentum(selection.rule("exact").select_with_residual, gradient, velocity, kept, 1, 0)
    assert chosen.indices.numpy() == [0] and np.isnan(chosen.values[0])
    np.testing.assert_allclose(velocity, [1.0, 1.8, 3.0])
    np.testing.assert_allclose(kept, [0.0, 1.8, 5.0])


def test_clipping_and_warm_up():
    np.testing.assert_allclose(residual.clip_before_accumulation(tf.constant([3.0, 4.0]), 2.0, 4), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(residual.clip_before_accumulation(tf.constant([0.3, 0.4]), 2.0, 4), np.float32([0.3, 0.4]))
    assert np.isnan(residual.clip_before_accumulation(tf.constant([np.nan, 1.0]), 2.0, 4)[0])
    assert [residual.warm_up_density(epoch) for epoch in (0, 1, 4, 9)] == [0.25, 0.063, 0.001, 0.001]
    for wrong in (lambda: residual.warm_up_density(-1), lambda: residual.clip_before_accumulation(tf.ones(1), 0, 1)):
        with pytest.raises(PlanError):
            wrong()


def test_random_is_uniform_and_dgc_is_near_exact():
    counts = np.zeros(20)
    for seed in range(500):
        counts[selection.rule("random").select(tf.zeros(20), 5, seed).indices.numpy()] += 1
    assert ((counts - 125) ** 2 / 125).sum() < 48  # chi-square, 19 degrees of freedom: fails once in 5,000
    x = tf.random.stateless_normal([100_000], [1, 2])
    exact = np.abs(selection.rule("exact").select(x, 1000, 0).values).sum()
    assert np.abs(selection.rule("dgc").select(x, 1000, 0).values).sum() >= 0.99 * exact
