"""Laws of selection: for every rule, dtype, size, thread count and kind of gradient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT
from vectors import DTYPES, KINDS, make, problems

from tfcommx import selection
from tfcommx.kernels import loader, select
from tfcommx.recipes.datasets import fashion_mnist
from tfcommx.recipes.models.small_cnn import small_cnn
from tfcommx.terms import SPARSE_WIRES, PlanError
from tfcommx.wire import codec
from tfcommx.wire.formats import size_bytes

RULES = ("exact", "mstopk")
NATIVE = SimpleNamespace(select=select.select, select_with_residual=select.select_with_residual)
DEFINITION = SimpleNamespace(
    select=select.select_definition,
    select_with_residual=select.select_with_residual_definition,
)
IMPLEMENTATIONS = {"native": NATIVE, "definition": DEFINITION}
some = settings(max_examples=60)


@pytest.fixture(autouse=True, scope="module")
def library():
    assert loader.library() is not None, (
        "set-up builds the native library: python scripts/bootstrap.py"
    )


MOMENTUM = 0.9


def run(implementation, gradient, residual, k, seed, rule, velocity=None):
    """Select once; return NumPy arrays.

    Returns:
        Indices, values, the residual afterwards (None without one), acc, the velocity afterwards.
    """
    acc = tf.cast(gradient, tf.float32)
    if residual is None:
        chosen = implementation.select(gradient, k, seed, rule)
        return chosen.indices.numpy(), chosen.values.numpy(), None, acc.numpy(), None
    states = [tf.Variable(residual)]
    if velocity is not None:
        states.append(tf.Variable(velocity))
        acc = np.float32(MOMENTUM) * tf.constant(velocity) + acc
    chosen = implementation.select_with_residual(
        gradient, states[0], k, seed, rule, *states[1:], momentum=MOMENTUM
    )
    after, moved = [*(state.numpy() for state in states), None][:2]
    return chosen.indices.numpy(), chosen.values.numpy(), after, (acc + residual).numpy(), moved


def check_velocity(indices, acc, moved, gradient, velocity):
    """Factor masking: what was sent has no velocity any more, the rest has moved.

    A NaN or Inf changes nothing.
    """
    bad, sent = ~np.isfinite(acc), np.isin(np.arange(acc.size), indices)
    now = (np.float32(MOMENTUM) * tf.constant(velocity) + tf.cast(gradient, tf.float32)).numpy()
    np.testing.assert_array_equal(
        moved, np.where(bad, velocity, np.where(sent, np.float32(0), now))
    )


def check_laws(indices, values, after, acc, residual, k):
    assert indices.shape == values.shape == (k,)
    assert indices.dtype == np.int32 and values.dtype == np.float32
    assert (np.diff(indices) > 0).all() and (k == 0 or (indices[0] >= 0 and indices[-1] < acc.size))
    np.testing.assert_array_equal(values, acc[indices])
    bad = ~np.isfinite(acc)
    # Non-finite entries go first, lowest index first.
    first = np.flatnonzero(bad)[:k]
    assert np.isin(first, indices).all() and bad[indices].sum() == first.size
    if after is not None:
        assert np.isfinite(after).all()
        sent = np.zeros_like(acc)
        sent[indices] = values
        np.testing.assert_array_equal((sent + after)[~bad], acc[~bad])
        assert (after[indices][~bad[indices]] == 0).all()
        np.testing.assert_array_equal(after[bad], residual[bad])


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("rule", RULES)
@some
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
@some
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_large_vectors(rule, kind):
    """Enough entries for several blocks and for samples, with lists and without."""
    n = 1_200_007
    gradient, residual = (
        make(kind, n, 5),
        make("normal", n, 6) * (kind in ("normal", "not_finite", "huge")),
    )
    for k in (7, n // 1000, n // 100, n // 3):
        for velocity in (None, make("laplace", n, 7)):
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
    n = 600_000
    gradient = np.sort(np.abs(make("laplace", n, 1)))[::order]
    mine = run(NATIVE, tf.constant(gradient), np.zeros(n, np.float32), n // 100, 3, rule)
    specified = run(DEFINITION, tf.constant(gradient), np.zeros(n, np.float32), n // 100, 3, rule)
    for a, b in zip(mine[:4], specified[:4], strict=True):
        np.testing.assert_array_equal(a, b)


@some
@given(problem=problems())
def test_exact_takes_the_largest(problem):
    gradient, residual, k, seed = problem
    indices, _, _, acc, _ = run(NATIVE, gradient, residual, k, seed, "exact")
    size = np.where(np.isfinite(acc), np.abs(acc), np.inf)
    expected = np.sort(np.lexsort((np.arange(size.size), -size))[:k])
    np.testing.assert_array_equal(indices, expected)


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1])
def test_mstopk_takes_all_above_the_band_and_captures_the_magnitude(kind, density):
    n = 400_000
    k = max(1, int(n * density))
    gradient = tf.constant(make(kind, n, 2))
    size = np.abs(gradient.numpy())
    indices = select.select(gradient, k, 11, "mstopk").indices.numpy()
    exact = select.select(gradient, k, 11, "exact").indices.numpy()
    assert size[indices].sum() >= 0.99 * size[exact].sum()
    upper = np.sort(size)[-k] * (1 + 2.0**-12)  # the band is not wider
    assert np.isin(np.flatnonzero(size > upper), indices).all()
    assert (size[indices] >= np.sort(size)[-k] / (1 + 2.0**-12)).all()


def real_gradients() -> np.ndarray:
    """Compute one gradient of the demo's model after a few steps of training: float32 [61,050]."""
    images, labels, *_ = fashion_mnist.load(fashion_mnist.fetch())
    keras.utils.set_random_seed(1)
    model = small_cnn((16, 32, 64), 1, 10)
    optimizer = keras.optimizers.SGD(0.05)
    for step in range(5):
        batch = slice(128 * step, 128 * (step + 1))
        with tf.GradientTape() as tape:
            logits = model(
                images[batch].astype(np.float32)[..., None].reshape(-1, 28, 28, 1), training=True
            )
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels[batch], logits, from_logits=True
                )
            )
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
    return np.concatenate([gradient.numpy().ravel() for gradient in found])


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_mstopk_captures_the_magnitude_of_real_gradients(density):
    gradient = real_gradients()
    assert gradient.size == 61_050 and np.isfinite(gradient).all()
    k = int(gradient.size * density)
    chosen = {
        rule: np.abs(select.select(tf.constant(gradient), k, 3, rule).values.numpy()).sum()
        for rule in RULES
    }
    assert chosen["exact"] > 0 and chosen["mstopk"] >= 0.99 * chosen["exact"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_window_is_fair(implementation):
    """12 equal entries in the band, 5 wanted: each of the 8 windows is equally likely."""
    gradient = np.zeros(30, np.float32)
    gradient[5:29:2] = 1.0
    gradient[[0, 3]] = -4.0
    band = list(range(5, 29, 2))
    draws = 800
    counts = np.zeros(8)
    choose = tf.function(
        lambda seed: (
            IMPLEMENTATIONS[implementation].select(tf.constant(gradient), 7, seed, "mstopk").indices
        ),
        autograph=False,
    )
    for seed in range(draws):
        indices = choose(tf.constant(seed, tf.int64)).numpy()
        assert indices[0] == 0 and indices[1] == 3
        start = band.index(indices[2])
        assert list(indices[2:]) == band[start : start + 5]
        counts[start] += 1
    # chi-square with 7 degrees of freedom: 29.9 is exceeded once in 10,000 fair draws
    assert ((counts - draws / 8) ** 2 / (draws / 8)).sum() < 29.9, counts


def test_splitmix64_is_the_published_one():
    assert int(select.splitmix64(0)) == 0xE220A8397B1DCDAF
    assert int(select.splitmix64(1)) == 0x910A2DEC89025CC1


@pytest.mark.parametrize("name", selection.RULES)
@some
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
    """Collectives count the bytes of what is sent while they are traced."""
    if not with_library:
        monkeypatch.setattr(loader, "library", lambda: None)
    k = 10 if name == "all" else 7
    residual = tf.Variable(tf.zeros(10))

    @tf.function
    def step(gradient, seed):
        chosen = selection.rule(name).select_with_residual(gradient, residual, k, seed)
        assert chosen.indices.shape == chosen.values.shape == (k,) and chosen.size == 10
        for wire_name in SPARSE_WIRES:
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
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`k` must be in \[1, n\]"):
        IMPLEMENTATIONS[implementation].select(tf.zeros([10]), k, 0, "exact")


def test_a_wrong_residual_is_refused():
    for residual in (tf.Variable(tf.zeros([9])), tf.Variable(tf.zeros([10], tf.float64))):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="as many entries as `gradient`, 10"
        ):
            select.select_with_residual(tf.zeros([10]), residual, 1, 0, "exact")


def test_a_wrong_velocity_is_refused():
    residual = tf.Variable(tf.zeros([10]))
    for velocity, momentum, message in (
        (
            tf.Variable(tf.zeros([9])),
            0.9,
            "`velocity` must be a float32 variable of as many entries",
        ),
        (tf.Variable(tf.zeros([10])), 1.0, r"`momentum` must be in \[0, 1\)"),
        (residual, 0.9, "another variable than `residual`"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            select.select_with_residual(tf.zeros([10]), residual, 1, 0, "exact", velocity, momentum)


def test_unknown_rules_and_partial_all_are_refused():
    with pytest.raises(PlanError, match="Did you mean 'mstopk'"):
        selection.rule("mstop")
    with pytest.raises(PlanError, match="needs k = n"):
        selection.rule("all").select(tf.zeros([10]), 3)


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
            states = [tf.Variable(make("laplace", 1_000_003, seed)) for seed in range(1 + momentum)]
            gradient = tf.constant(make(kind, 1_000_003, 1))
            chosen = select.select_with_residual(
                gradient, states[0], 9_000, 5, rule, *states[1:], momentum=0.9
            )
            for part in (*chosen[:2], *states):
                digest.update(part.numpy().tobytes())
print(json.dumps(digest.hexdigest()))
"""


def test_the_number_of_threads_changes_nothing():
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    results = {
        json.loads(
            subprocess.run(
                [sys.executable, "-c", THREADS, str(threads)],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            ).stdout
        )
        for threads in (1, 2, 7)
    }
    assert len(results) == 1
