"""Gradients that are hard to select from; the law tests draw from them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

DTYPES = {"float32": tf.float32, "float16": tf.float16, "bfloat16": tf.bfloat16}
KINDS = (
    "normal",
    "laplace",
    "ties",
    "equal",
    "zero",
    "sparse",
    "denormal",
    "one_bin",
    "not_finite",
    "all_nan",
    "huge",
)


def make(kind: str, n: int, seed: int) -> np.ndarray:
    """Return a float32 [n] vector of the named kind."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(n).astype(np.float32)
    if kind == "laplace":
        x = random.laplace(size=n).astype(np.float32)
    elif kind == "ties":
        x = random.integers(-3, 4, n).astype(np.float32)
    elif kind == "equal":
        x = np.full(n, -1.5, np.float32)
    elif kind == "zero":
        x = np.zeros(n, np.float32)
    elif kind == "sparse":
        x[random.random(n) < 0.999] = 0
    elif kind == "denormal":
        x *= np.float32(1e-39)
    elif kind == "one_bin":  # so close together that only the last bits differ
        x = (1 + random.integers(0, 64, n) * 2.0**-23).astype(np.float32)
    elif kind == "not_finite":
        bad = random.random(n) < 10.0 ** -random.integers(0, 4)
        x[bad] = random.choice(np.array([np.nan, np.inf, -np.inf], np.float32), bad.sum())
    elif kind == "all_nan":
        x = np.full(n, np.nan, np.float32)
    elif kind == "huge":  # sums overflow
        with np.errstate(over="ignore"):
            x *= np.float32(2e38)
    return x


@st.composite
def problems(draw):
    """Draw (gradient tensor, residual float32 array, k, seed)."""
    n = draw(
        st.one_of(
            st.integers(1, 40), st.integers(1, 20_000), st.sampled_from([4095, 4096, 4097, 70_001])
        )
    )
    seed = draw(st.integers(0, 2**31))
    gradient = tf.cast(
        make(draw(st.sampled_from(KINDS)), n, seed), DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    )
    residual = make(draw(st.sampled_from(("zero", "normal", "ties", "huge"))), n, seed + 1)
    residual[~np.isfinite(residual)] = 1.0
    k = draw(st.one_of(st.integers(1, n), st.integers(1, max(1, n // 20)), st.just(n), st.just(1)))
    return gradient, residual, k, draw(st.integers(-(2**63), 2**63 - 1))
