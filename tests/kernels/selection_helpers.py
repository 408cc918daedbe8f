"""Shared by the tests of selection: implementations, and the checks of the laws."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import tensorflow as tf

from tfcommx.kernels import select

RULES = ("exact", "mstopk")


NATIVE = SimpleNamespace(select=select.select, select_with_residual=select.select_with_residual)


DEFINITION = SimpleNamespace(
    select=select.select_definition,
    select_with_residual=select.select_with_residual_definition,
)


IMPLEMENTATIONS = {"native": NATIVE, "definition": DEFINITION}


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
    """Check factor masking: the velocity of sent entries is zero, that of the others is updated.

    A NaN or Inf leaves the velocity unchanged.
    """
    bad, sent = ~np.isfinite(acc), np.zeros(acc.size, bool)
    sent[indices] = True
    now = (np.float32(MOMENTUM) * tf.constant(velocity) + tf.cast(gradient, tf.float32)).numpy()
    np.testing.assert_array_equal(
        moved, np.where(bad, velocity, np.where(sent, np.float32(0), now))
    )


def check_laws(indices, values, after, acc, residual, k):
    """Check k entries in order, non-finite ones first, and that nothing is lost."""
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
