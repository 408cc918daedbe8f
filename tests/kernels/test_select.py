"""Laws of selection: for every rule, dtype, size, thread count and kind of gradient."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import warm_ranks
from drawing import case
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import QUICK, ROOT
from selection_helpers import (
    DEFINITION,
    IMPLEMENTATIONS,
    MOMENTUM,
    NATIVE,
    RULES,
    check_laws,
    check_velocity,
    run,
)
from vectors import DTYPES, KINDS, make, problems

from tfcommx import selection
from tfcommx.core import SPARSE_WIRES, ConfigurationError, PlanError
from tfcommx.kernels import loader, select
from tfcommx.wire import codec
from tfcommx.wire.formats import size_bytes

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("rule", RULES)
@given(problem=problems())
def test_laws_hold_and_native_equals_definition(rule, with_residual, problem):
    gradient, residual, k, seed = problem
    residual = residual if with_residual else None
    results = {
        name: run(implementation, gradient, residual, k, seed, rule)
        for name, implementation in IMPLEMENTATIONS.items()
    }
    for *result, _ in results.values():
        check_laws(*result, residual, k)
    for mine, specified in zip(results["native"][:3], results["definition"][:3], strict=True):
        np.testing.assert_array_equal(mine, specified)


@pytest.mark.parametrize("rule", RULES)
@given(problem=problems(), moving=st.sampled_from(("normal", "ties", "huge", "denormal")))
def test_laws_hold_with_momentum_and_native_equals_definition(rule, problem, moving):
    gradient, residual, k, seed = problem
    velocity = make(moving, residual.size, 4)
    velocity[~np.isfinite(velocity)] = 1.0
    results = {
        name: run(implementation, gradient, residual, k, seed, rule, velocity)
        for name, implementation in IMPLEMENTATIONS.items()
    }
    for *result, moved in results.values():
        check_laws(*result, residual, k)
        check_velocity(result[0], result[3], moved, gradient, velocity)
    for mine, specified in zip(results["native"], results["definition"], strict=True):
        np.testing.assert_array_equal(mine, specified)


@pytest.mark.parametrize(
    ("kind", "rule", "moving"),
    [
        case(
            kind,
            rule,
            moving,
            kept=place == number % len(RULES) and moving == number // len(RULES) % 2,
        )
        for number, kind in enumerate(KINDS)
        for place, rule in enumerate(RULES)
        for moving in (0, 1)
    ],
)
def test_large_vectors(rule, kind, moving):
    """Enough entries for several blocks and for samples, with lists and without.

    `moving`: every other k has a velocity, from this one on.
    """
    n = 400_009  # six blocks, which share 98 tiles
    gradient, residual = (
        make(kind, n, 5),
        make("normal", n, 6) * (kind in ("normal", "not_finite", "huge")),
    )
    for number, k in enumerate((7, n // 1000, n // 100, n // 3)):
        velocity = make("laplace", n, 7) if number % 2 == moving else None
        *mine, moved = run(NATIVE, tf.constant(gradient), residual, k, k, rule, velocity)
        check_laws(*mine, residual, k)
        if moved is not None:
            check_velocity(mine[0], mine[3], moved, tf.constant(gradient), velocity)
        specified = run(DEFINITION, tf.constant(gradient), residual, k, k, rule, velocity)
        for a, b in zip([*mine, moved], specified, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("rule", RULES)
def test_sorted_vectors(rule, order):
    """All large entries lie side by side: neither sample nor list may depend on positions."""
    n = 300_000
    gradient = np.sort(np.abs(make("laplace", n, 1)))[::order]
    mine = run(NATIVE, tf.constant(gradient), np.zeros(n, np.float32), n // 100, 3, rule)
    specified = run(DEFINITION, tf.constant(gradient), np.zeros(n, np.float32), n // 100, 3, rule)
    for a, b in zip(mine[:4], specified[:4], strict=True):
        np.testing.assert_array_equal(a, b)


@given(problem=problems())
def test_exact_takes_the_largest(problem):
    gradient, residual, k, seed = problem
    indices, _, _, acc, _ = run(NATIVE, gradient, residual, k, seed, "exact")
    size = np.where(np.isfinite(acc), np.abs(acc), np.inf)
    expected = np.sort(np.lexsort((np.arange(size.size), -size))[:k])
    np.testing.assert_array_equal(indices, expected)


@pytest.mark.parametrize("name", selection.RULES)
@given(problem=problems())
def test_laws_hold_for_every_rule_of_the_table(name, problem):
    gradient, residual, k, seed = problem
    k = gradient.shape[0] if name == "all" else k
    rule = selection.rule(name)
    acc = (tf.cast(gradient, tf.float32) + residual).numpy()
    variable = tf.Variable(residual)
    chosen = rule.select_with_residual(gradient, variable, k, seed)
    assert chosen.size == gradient.shape[0]
    check_laws(chosen.indices.numpy(), chosen.values.numpy(), variable.numpy(), acc, residual, k)
    velocity = make("normal", residual.size, 4)
    kept, moved = tf.Variable(residual), tf.Variable(velocity)
    acc = (
        np.float32(MOMENTUM) * tf.constant(velocity) + tf.cast(gradient, tf.float32) + residual
    ).numpy()
    chosen = rule.select_with_residual(gradient, kept, k, seed, moved, MOMENTUM)
    check_laws(chosen.indices.numpy(), chosen.values.numpy(), kept.numpy(), acc, residual, k)
    check_velocity(chosen.indices.numpy(), acc, moved.numpy(), gradient, velocity)
    chosen = rule.select(gradient, k, seed)
    check_laws(
        chosen.indices.numpy(),
        chosen.values.numpy(),
        None,
        tf.cast(gradient, tf.float32).numpy(),
        None,
        k,
    )


@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize("name", selection.RULES)
def test_the_length_is_known_while_tracing(name, with_library, monkeypatch):
    """Collectives count the bytes to send while they are traced."""
    if not with_library:
        monkeypatch.setattr(loader, "library", lambda: None)
    k = 10 if name == "all" else 7
    residual = tf.Variable(tf.zeros(10))

    @tf.function
    def step(gradient, seed):
        chosen = selection.rule(name).select_with_residual(gradient, residual, k, seed)
        assert chosen.indices.shape == chosen.values.shape == (k,) and chosen.size == 10
        for wire_name in SPARSE_WIRES if name == "exact" else ():  # Entries are as those of others
            assert codec.encode(chosen, wire_name).shape == [size_bytes(k, 10, wire_name) // 4]
        return chosen.indices

    assert step(tf.ones(10), tf.constant(1, tf.int64)).shape == (k,)


@given(offset=st.integers(1, 15), dtype=st.sampled_from(sorted(DTYPES)))
@settings(max_examples=15)
def test_slices_at_any_alignment(offset, dtype):
    whole = tf.cast(tf.reshape(make("normal", 16 * 5001, 3), [16, 5001]), DTYPES[dtype])
    row = whole[offset]
    copy = tf.constant(row.numpy())
    for rule in RULES:
        np.testing.assert_array_equal(
            select.select(row, 50, 1, rule).indices, select.select(copy, 50, 1, rule).indices
        )


def test_inside_a_function_the_residual_is_updated_once_a_call_and_old_reads_stay():
    residual = tf.Variable(tf.zeros(1000))
    gradient = tf.constant(make("normal", 1000, 1))

    @tf.function
    def step(seed):
        # the result is not used: still not pruned
        select.select_with_residual(gradient, residual, 10, seed, "exact")
        before = residual.read_value()
        chosen = select.select_with_residual(gradient, residual, 10, seed, "exact")
        return before, chosen

    before, chosen = step(tf.constant(1, tf.int64))
    acc = before + gradient
    np.testing.assert_array_equal(chosen.values, tf.gather(acc, chosen.indices))
    after = tf.tensor_scatter_nd_update(acc, chosen.indices[:, None], tf.zeros(10))
    np.testing.assert_array_equal(residual, after)
    assert chosen.indices.shape == (10,) and np.count_nonzero(before) == 990


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_gradient(rule):
    for implementation in IMPLEMENTATIONS.values():
        chosen = implementation.select_with_residual(
            tf.zeros([0]), tf.Variable(tf.zeros([0])), 0, 1, rule
        )
        assert chosen.indices.shape == chosen.values.shape == (0,)


@pytest.mark.parametrize("k", [0, 11, -1])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_k_out_of_range_is_refused(implementation, k):
    with pytest.raises(tf.errors.InvalidArgumentError, match="`k`"):
        IMPLEMENTATIONS[implementation].select(tf.zeros([10]), k, 0, "exact")


def test_a_wrong_residual_is_refused():
    for residual in (tf.Variable(tf.zeros([9])), tf.Variable(tf.zeros([10], tf.float64))):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"`residual`.*`gradient`"):
            select.select_with_residual(tf.zeros([10]), residual, 1, 0, "exact")


def test_a_wrong_velocity_is_refused():
    residual = tf.Variable(tf.zeros([10]))
    for velocity, momentum, named in (
        (
            tf.Variable(tf.zeros([9])),
            0.9,
            r"`velocity`.*`gradient`",
        ),
        (tf.Variable(tf.zeros([10])), 1.0, "`momentum`"),
        (residual, 0.9, r"`velocity`.*`residual`"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=named):
            select.select_with_residual(tf.zeros([10]), residual, 1, 0, "exact", velocity, momentum)


def test_unknown_rules_and_partial_all_are_refused():
    with pytest.raises(ConfigurationError, match=r"'mstop'.*'mstopk'"):
        selection.rule("mstop")
    with pytest.raises(PlanError, match=r"'all'.*k=3, n=10\b"):
        selection.rule("all").select(tf.zeros([10]), 3)


@pytest.mark.parametrize("k", [0, 11, -1])
@pytest.mark.parametrize("name", selection.RULES)
def test_every_rule_refuses_k_out_of_range(name, k):
    """Fewer entries than k, or others than none, were chosen if k was a tensor."""
    refused = (PlanError, tf.errors.InvalidArgumentError)
    choose = tf.function(lambda gradient, k: selection.rule(name).select(gradient, k).indices)
    for number in (k, tf.constant(k)):
        with pytest.raises(refused, match=r"\bk\b"):
            selection.rule(name).select(tf.ones([10]), number)
    with pytest.raises(refused, match=r"\bk\b"):
        choose(tf.ones([10]), tf.constant(k))


THREADS = """
import hashlib, json, sys
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
from vectors import make
from tfcommx.kernels import select
digest = hashlib.sha256()
for kind in ("normal", "ties", "not_finite", "zero"):
    for rule in ("exact", "mstopk"):
        for momentum in (False, True):
            states = [tf.Variable(make("laplace", 500_009, seed)) for seed in range(1 + momentum)]
            gradient = tf.constant(make(kind, 500_009, 1))
            chosen = select.select_with_residual(
                gradient, states[0], 5_000, 5, rule, *states[1:], momentum=0.9
            )
            for part in (*chosen[:2], *states):
                digest.update(part.numpy().tobytes())
print(json.dumps(digest.hexdigest()))
"""


@pytest.mark.extended
def test_the_number_of_threads_changes_nothing():
    path = os.pathsep.join([str(ROOT / "tests"), QUICK])
    start = {**os.environ, "PYTHONPATH": path, **warm_ranks.environment(alone=True)}
    results = {
        json.loads(
            subprocess.run(
                [sys.executable, "-c", THREADS, str(threads)],
                check=True,
                capture_output=True,
                text=True,
                env=start,
            ).stdout
        )
        for threads in (1, 2, 7)
    }
    assert len(results) == 1
