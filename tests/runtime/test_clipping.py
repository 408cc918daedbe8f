"""Error feedback reaches the dense solution, and wrappers of a rule follow their definitions."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from drawing import case

from tfcommx import selection
from tfcommx.core import PlanError, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.bucket_runner import BucketSelector, clip_before_accumulation


def distance_to_the_solution(rule: str, density: float, feedback: bool) -> float:
    """Descend a least-squares problem whose 8 ranks disagree.

    Returns the relative distance to the dense solution.
    """
    ranks, n = 8, 40
    random = np.random.default_rng(0)
    matrices = random.standard_normal((ranks, 60, n)).astype(np.float32) / 60**0.5
    # No common solution: local gradients never vanish
    targets = random.standard_normal((ranks, 60)).astype(np.float32) * 3
    best = np.linalg.lstsq(matrices.reshape(-1, n), targets.reshape(-1), rcond=None)[0]
    module, k = selection.rule(rule), max(1, int(density * n))
    kept = [tf.Variable(tf.zeros(n)) for _ in range(ranks)]
    x = np.zeros(n, np.float32)
    for step in range(1000):
        total = np.zeros(n, np.float32)
        for rank in range(ranks):
            gradient = tf.constant(matrices[rank].T @ (matrices[rank] @ x - targets[rank]))
            choose = (
                functools.partial(module.select_with_residual, gradient, kept[rank])
                if feedback
                else functools.partial(module.select, gradient)
            )
            sent = choose(k, step)
            np.add.at(total, sent.indices.numpy(), sent.values.numpy())
        x = x - 0.5 / (1 + step / 30) * total / ranks
    return float(np.linalg.norm(x - best) / np.linalg.norm(best))


@pytest.mark.extended
@pytest.mark.parametrize("rule", [case("exact", kept=False), "mstopk"])
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
        chosen = rule(tf.constant(g), kept, 5, step, velocity, 0.9)
        np.testing.assert_allclose(chosen.values, v[chosen.indices.numpy()], rtol=1e-5)
        u[chosen.indices.numpy()] = v[chosen.indices.numpy()] = 0
        np.testing.assert_allclose(velocity, u, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(kept, v, rtol=1e-5, atol=1e-6)


def test_momentum_correction_keeps_nan_out_of_its_state():
    velocity, kept = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([0.0, 0.0, 5.0])
    gradient = tf.constant([np.nan, 0.0, np.inf])
    chosen = selection.rule("exact").select_with_residual(gradient, kept, 1, 0, velocity, 0.9)
    assert chosen.indices.numpy() == [0] and np.isnan(chosen.values[0])
    np.testing.assert_allclose(velocity, [1.0, 1.8, 3.0])
    np.testing.assert_allclose(kept, [0.0, 1.8, 5.0])


def test_clipping():
    clip = clip_before_accumulation
    # The norm of all together
    parts = clip([tf.constant([3.0]), tf.constant([[4.0]], tf.float16)], 2.0, 4)
    np.testing.assert_allclose(parts[0], [0.6], rtol=1e-6)
    np.testing.assert_allclose(parts[1], [[0.8]], rtol=1e-3)
    np.testing.assert_allclose(
        clip([tf.constant([6.0, 8.0])], 2.0, 4, "average")[0], [2.4, 3.2], rtol=1e-6
    )
    np.testing.assert_array_equal(
        clip([tf.constant([0.3, 0.4])], 2.0, 4)[0], np.float32([0.3, 0.4])
    )
    assert np.isnan(clip([tf.constant([np.nan, 1.0])], 2.0, 4)[0][0])


def test_warm_up_is_a_scheme_an_epoch():
    scheme = Scheme("allgather", "mstopk", 0.001, momentum=0.9)
    ladder = scheme.warm_up()
    assert [ladder[epoch].density for epoch in range(5)] == [0.25, 0.063, 0.015, 0.004, 0.001]
    assert ladder[4] == scheme and ladder[0].momentum == 0.9 and len(ladder) == 5
    with pytest.raises(PlanError, match=r"`density`.*\b0\.$"):
        scheme.warm_up([0.5, 0])


@pytest.mark.parametrize(
    ("settings", "received"),
    [
        ({"momentum": 1}, r"`momentum`.*\b1\.$"),
        ({"momentum": -0.1}, r"`momentum`.*-0\.1\b"),
        ({"clip_norm": 0}, r"`clip_norm`.*\b0\.$"),
        ({"clip_norm": float("nan")}, r"`clip_norm`.*\bnan\b"),
        (
            {"route": "allreduce", "selection": "all", "density": 1, "momentum": 0.9},
            r"route='allreduce'.*momentum=0\.9",
        ),
        (
            {"route": "allgather", "selection": "all", "density": 1, "clip_norm": 1.0},
            r"route='allgather'.*clip_norm=1\.0",
        ),
    ],
)
def test_bad_settings_are_refused(settings, received):
    with pytest.raises(PlanError, match=received):
        Scheme(**{"route": "allgather", "selection": "exact", "density": 0.1} | settings)


def test_seeds_differ_between_steps_buckets_ranks_and_schemes():
    gradients, seeds = [Gradient(name, (2, 2), "float32") for name in "ab"], []
    for seed in range(3):
        scheme = Scheme("allgather", "random", 0.5, dense_below=0, merging="each", seed=seed)
        plan = make_plan(gradients, {"*": scheme}, Topology(64, 1))
        for index, rank in itertools.product(range(len(plan.buckets)), range(64)):
            selector = BucketSelector(plan, index, None, SimpleNamespace(rank=rank))
            seeds += [int(selector.seed(step)) for step in tf.constant([1, 2], tf.int64)]
    assert len(seeds) == len(set(seeds)) == 3 * 2 * 64 * 2


def test_random_is_uniform_and_dgc_is_near_exact():
    counts = np.zeros(20)
    for seed in range(500):
        counts[selection.rule("random").select(tf.zeros(20), 5, seed).indices.numpy()] += 1
    # Chi-square, 19 degrees of freedom: fails once in 5,000
    assert ((counts - 125) ** 2 / 125).sum() < 48
    x = tf.random.stateless_normal([100_000], [1, 2])
    exact = np.abs(selection.rule("exact").select(x, 1000, 0).values).sum()
    assert np.abs(selection.rule("dgc").select(x, 1000, 0).values).sum() >= 0.99 * exact
