"""Operations of several threads on the same variables lose nothing and never wait in a circle."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.kernels import dense, select, sparse

pytestmark = pytest.mark.usefixtures("library")
SIZE, K, CALLS = 50_000, 500, 40


def run_together(*jobs: Callable[[], None]) -> None:
    """Run jobs in threads, and require that all of them end without an error."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[job], daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "an operation waits for another one"
    assert not errors, errors


def test_selections_from_one_residual_lose_nothing() -> None:
    """Whole numbers, so that sums are exact in any order; a value that was read stays."""
    gradient = np.random.default_rng(1).integers(-9, 10, SIZE).astype(np.float32)
    residual = tf.Variable(tf.zeros([SIZE]))
    sent = [np.zeros(SIZE) for _ in range(3)]

    def job(total: np.ndarray, rule: str) -> None:
        given = tf.constant(gradient)
        for seed in range(CALLS):
            chosen = select.select_with_residual(given, residual, K, seed, rule)
            before = residual.read_value()
            copy = before.numpy().copy()
            total[chosen.indices.numpy()] += chosen.values.numpy()
            np.testing.assert_array_equal(before, copy)

    run_together(
        *(
            lambda total=total, rule=rule: job(total, rule)
            for total, rule in zip(sent, ("exact", "mstopk", "exact"), strict=True)
        )
    )
    np.testing.assert_array_equal(sum(sent) + residual.numpy(), 3 * CALLS * gradient)


def test_a_residual_and_a_velocity_in_both_roles_do_not_wait_for_each_other() -> None:
    """Each of two selections had locked the variable that the other one waited for."""
    gradient = tf.ones([SIZE])
    one, other = (tf.Variable(tf.zeros([SIZE])) for _ in range(2))

    def job(residual: tf.Variable, velocity: tf.Variable) -> None:
        for seed in range(10 * CALLS):
            select.select_with_residual(gradient, residual, K, seed, "mstopk", velocity, 0.5)

    run_together(lambda: job(one, other), lambda: job(other, one))
    assert np.isfinite(one.numpy()).all() and np.isfinite(other.numpy()).all()


def test_rounding_and_keeping_in_one_residual_lose_nothing() -> None:
    residual, written = tf.Variable(tf.zeros([SIZE])), [np.zeros(SIZE) for _ in range(2)]
    gradient = tf.constant(np.random.default_rng(2).integers(-9, 10, SIZE) + 2.0**-12, tf.float32)

    def job(total: np.ndarray) -> None:
        for _ in range(CALLS):
            total += dense.write(gradient, residual, "float16").numpy().astype(np.float64)

    run_together(*(lambda total=total: job(total) for total in written))
    np.testing.assert_array_equal(
        sum(written) + residual.numpy(), 2 * CALLS * gradient.numpy().astype(np.float64)
    )


def test_sums_of_several_threads_have_the_same_bits() -> None:
    draw = np.random.default_rng(3)
    indices = tf.constant(np.tile(np.arange(0, 10 * SIZE, 10, dtype=np.int32), 4))
    values = tf.constant(draw.standard_normal(4 * SIZE).astype(np.float32))
    expected = sparse.merge(indices, values, 10 * SIZE, SIZE).numpy()

    def job() -> None:
        for _ in range(CALLS // 4):
            merged = sparse.merge(indices, values, 10 * SIZE, SIZE)
            np.testing.assert_array_equal(merged, expected)

    run_together(job, job, job)
