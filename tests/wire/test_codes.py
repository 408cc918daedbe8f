"""Codes of 8 and 4 bits: written plus error is the value, and rounding twice changes nothing."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfcommx.core import Sparse
from tfcommx.core.wire_formats import CODE_BITS
from tfcommx.kernels.wire_codes import (
    read_definition,
    round_definition,
    round_values,
    write_definition,
)
from tfcommx.wire import codec

LARGEST = {dtype: 2 ** (bits - 1) - 1 for dtype, bits in CODE_BITS.items()}
every_dtype = pytest.mark.parametrize("dtype", CODE_BITS)
normal_floats = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
# Whole blocks, and parts; magnitudes of all exponents, and of few
vectors = st.one_of(
    st.lists(normal_floats, min_size=1, max_size=40),
    st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=70),
)


def as_bits(*tensors: tf.Tensor) -> list[bytes]:
    return [one.numpy().tobytes() for one in tensors]


@every_dtype
@given(values=vectors)
def test_law_of_the_rounding_error(dtype: str, values: list[float]) -> None:
    """Written plus error is the value, in exact arithmetic; rounded again, the error is zero."""
    given_values = tf.constant(values, tf.float32)
    written, errors = round_values(given_values, dtype)
    for value, sent, error in zip(given_values, written, errors, strict=True):
        rest = Fraction(float(value)) - Fraction(float(sent))
        if rest == 0 or abs(rest) >= Fraction(2) ** -126:
            assert Fraction(float(error)) == rest
    again, nothing = round_values(written, dtype)
    np.testing.assert_array_equal(again, written)
    assert not nothing.numpy().any()
    assert as_bits(*round_definition(given_values, dtype)) == as_bits(written, errors)


@every_dtype
def test_the_error_is_at_most_half_a_step(dtype: str) -> None:
    values = np.random.default_rng(1).laplace(size=1003).astype(np.float32)
    written, errors = (one.numpy() for one in round_values(tf.constant(values), dtype))
    for block in range(0, 1003, 32):
        part = slice(block, block + 32)
        step = np.abs(values[part]).max() / LARGEST[dtype]
        assert (np.abs(errors[part]) <= 0.5 * step * (1 + 2**-8)).all()
        # Each block has its own step, and uses its last code
        steps = np.abs(written[part]).max() / LARGEST[dtype]
        assert steps == pytest.approx(step, rel=2**-8)
        codes = written[part] / steps
        np.testing.assert_array_equal(codes, np.round(codes))
    assert np.count_nonzero(errors) > 900


@every_dtype
def test_a_value_that_is_not_finite_leaves_its_block_as_it_is(dtype: str) -> None:
    values = np.linspace(-3, 5, 64, dtype=np.float32)
    clean, clean_errors = (one.numpy() for one in round_values(tf.constant(values), dtype))
    places = [0, 17, 40]
    values[places] = [np.inf, np.nan, -np.inf]
    written, errors = (one.numpy() for one in round_values(tf.constant(values), dtype))
    assert np.isnan(written[places]).all() and not errors[places].any()
    others = [i for i in range(32, 64) if i not in places]  # The first block's largest is gone
    np.testing.assert_array_equal(written[others], clean[others])
    np.testing.assert_array_equal(errors[others], clean_errors[others])
    assert np.isfinite(np.delete(written, places)).all()


@every_dtype
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-45, 1e-38, 2.0**-126, 2.0**-120, 3.4028235e38, -3.4028235e38, 1.0]
)
def test_values_at_the_ends_of_float32(dtype: str, value: float) -> None:
    """Too small values become errors, the largest remain finite, and equal values have no error."""
    values = tf.fill([33], tf.constant(value, tf.float32))
    written, errors = round_values(values, dtype)
    assert np.isfinite(written).all() and np.isfinite(errors).all()
    if abs(value) < LARGEST[dtype] * 2.0**-126:
        assert not written.numpy().any() and as_bits(errors) == as_bits(values)
    else:
        np.testing.assert_allclose(written, values, rtol=0.008)
        # A denormal rest may be flushed
        np.testing.assert_allclose(written + errors, values, rtol=0, atol=2.0**-126)
    assert as_bits(*round_definition(values, dtype)) == as_bits(written, errors)


@every_dtype
def test_ties_go_to_the_even_code(dtype: str) -> None:
    largest = LARGEST[dtype]
    values = tf.constant([largest, 0.5, 1.5, 2.5, -0.5, -1.5], tf.float32)
    written, _ = round_values(values, dtype)
    assert written.numpy().tolist() == [largest, 0, 2, 2, 0, -2]


@every_dtype
@pytest.mark.parametrize("k", [0, 1, 31, 32, 33, 100])
def test_written_codes_are_read(dtype: str, k: int) -> None:
    values = tf.constant(np.random.default_rng(k).normal(size=k).astype(np.float32))
    written, _ = round_values(values, dtype)
    words = write_definition(values, dtype)
    assert as_bits(words) == as_bits(write_definition(written, dtype))
    native = codec.encode(Sparse(tf.range(k), values, k), f"elias/{dtype}")
    assert as_bits(native[len(native) - len(words) :]) == as_bits(words)
    if k:
        assert as_bits(read_definition(words[None], k, dtype)[0]) == as_bits(written)
