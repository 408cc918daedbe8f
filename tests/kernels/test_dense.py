"""A vector in 16 bits: native equals definition, and nothing is lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from vectors import KINDS, make

from tfcommx.kernels import dense, loader

IMPLEMENTATIONS = {
    "native": SimpleNamespace(write=dense.write, add=dense.add),
    "definition": SimpleNamespace(write=dense.write_definition, add=dense.add_definition),
}
# Others below compare the definition with the native op, bit for bit
every_implementation = pytest.mark.parametrize(
    "implementation", [case(name, kept=name == "native") for name in IMPLEMENTATIONS]
)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def test_the_library_is_there() -> None:
    assert loader.library() is not None


def numbers(written: tf.Tensor, dtype: str) -> np.ndarray:
    """Return the values of 16-bit numbers, as float64."""
    if dtype == "bfloat16":
        written = tf.bitcast(written, tf.bfloat16)
    return tf.cast(written, tf.float64).numpy()


@pytest.mark.parametrize(("scale", "reach"), [(1.0, 1.0), (0.25, 1.0), (0.125, 8.0)])
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_native_equals_definition_and_nothing_is_lost(
    kind: str, dtype: str, scale: float, reach: float
) -> None:
    """Also of a stretch of the residual, and of lengths that are no multiples of eight."""
    scale = 1.0 if dtype == "bfloat16" else scale
    for n, start, rest in [(1, 0, 0), (1001, 3, 5), (70_003, 0, 0)]:
        gradient = make(kind, n, 1)
        kept = make("laplace", start + n + rest, 2) * np.float32(1e-3)
        found = {}
        for name, one in IMPLEMENTATIONS.items():
            residual = tf.Variable(kept)
            before = residual.read_value()  # must not change with the variable
            written = one.write(tf.constant(gradient), residual, dtype, start, scale, reach)
            found[name] = numbers(written, dtype), residual.numpy()
            np.testing.assert_array_equal(before, kept)
        for mine, right in zip(*found.values(), strict=True):
            np.testing.assert_array_equal(mine, right)
        written, stays = found["native"]
        stretch = slice(start, start + n)
        np.testing.assert_array_equal(np.delete(stays, stretch), np.delete(kept, stretch))
        whole = tf.add(gradient, kept[stretch]).numpy()  # denormal numbers are zero in TensorFlow
        finite = np.isfinite(whole)
        assert np.isfinite(written[finite]).all() and not np.isfinite(written[~finite]).any()
        np.testing.assert_array_equal(stays[stretch][~finite], kept[stretch][~finite])
        lost = written[finite] / scale + stays[stretch][finite] - whole[finite].astype(np.float64)
        assert np.abs(lost).max(initial=0) < 1.2e-38


@every_dtype
@every_implementation
def test_every_number_of_16_bits_is_written_as_it_is(implementation: str, dtype: str) -> None:
    bits = tf.bitcast(tf.constant(np.arange(2**16, dtype=np.uint16)), tf.float16)
    one, residual = IMPLEMENTATIONS[implementation], tf.Variable(tf.zeros([2**16]))
    written = one.write(one.add(bits, dtype), residual, dtype)
    mine, right = numbers(written, dtype), numbers(bits, dtype)
    normal = ~(np.abs(right) < 2.0**-126)  # Denormal float32 numbers are zero
    np.testing.assert_array_equal(mine[normal], right[normal])
    assert not residual.numpy().any()


@every_dtype
def test_parts_are_added_in_float32_and_in_their_order(dtype: str) -> None:
    values = tf.cast(tf.constant(make("normal", 5 * 1003, 3)), dtype)
    written = values if dtype == "float16" else tf.bitcast(values, tf.float16)
    right = np.float32(0)
    for part in tf.split(tf.cast(values, tf.float32), 5):
        right = right + part.numpy()
    for one in IMPLEMENTATIONS.values():
        np.testing.assert_array_equal(one.add(written, dtype, 5, 0.3), right * np.float32(0.3))


def test_a_residual_of_another_bucket_is_refused() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`residual`.*\b5\b.*`gradient`"):
        dense.write(tf.ones([3]), tf.Variable(tf.zeros([4])), "float16", start=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`written`.*\b4\b.*\[6\]"):
        dense.add(tf.ones([6], tf.float16), "float16", parts=4)


def test_lengths_are_known_while_tracing() -> None:
    """Collectives count their bytes then."""
    residual = tf.Variable(tf.zeros([6]))

    @tf.function
    def both(gradient: tf.Tensor) -> tf.Tensor:
        written = dense.write(gradient, residual, "float16")
        assert written.shape == [6]
        total = dense.add(written, "float16", 3)
        assert total.shape == [2]
        return total

    assert both(tf.range(6.0)).numpy().tolist() == [6.0, 9.0]
