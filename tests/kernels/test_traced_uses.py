"""Native ops in transformed graphs: unknown lengths, loops, XLA, gradients, dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.core import Sparse
from tfcommx.kernels import dense, lars, low_bits, select, sparse, wire

pytestmark = pytest.mark.usefixtures("library")
GRADIENT = np.float32([3, -8, 1, 0.5, 7, -2, 0, 4])


def chosen(gradient: tf.Tensor, k: tf.Tensor | int = 2) -> tf.Tensor:
    return select.select(gradient, k, 0, "exact").values


@pytest.mark.parametrize("shape", [[None], None], ids=["length", "rank"])
def test_lengths_and_ranks_that_only_the_step_knows(shape: list[None] | None) -> None:
    residual = tf.Variable(tf.zeros([8]))

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def step(gradient: tf.Tensor) -> tuple[tf.Tensor, ...]:
        k = tf.size(gradient) // 4
        entries = select.select(gradient, k, 0, "exact")
        words = wire.encode(Sparse(entries.indices, entries.values, 8), "elias/float32")
        merged = sparse.merge(*wire.decode(words, 2, 8, "elias/float32"), 8, 2)
        codes = low_bits.read(low_bits.write(gradient, residual, "int8", 8, 8), "int8", 8)
        return merged, codes, lars.squared_norms([gradient])

    merged, codes, squares = step(GRADIENT)
    assert merged.numpy().tolist() == [0, -8, 0, 0, 7, 0, 0, 0]
    np.testing.assert_allclose(codes + residual, GRADIENT, atol=1e-6)
    assert squares.numpy().tolist() == [float(np.square(GRADIENT).sum())]


def test_a_loop_over_rows_gives_the_same_as_row_by_row() -> None:
    rows = tf.stack([GRADIENT, GRADIENT[::-1], -GRADIENT])
    expected = [chosen(row).numpy().tolist() for row in rows]
    assert tf.map_fn(chosen, rows).numpy().tolist() == expected
    assert tf.vectorized_map(chosen, rows).numpy().tolist() == expected


def test_xla_names_the_op_that_it_cannot_compile() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="TfcommxSelect"):
        tf.function(chosen, jit_compile=True)(tf.constant(GRADIENT))


def test_a_gradient_through_a_choice_is_an_error_and_not_zero() -> None:
    gradient = tf.constant(GRADIENT)
    with tf.GradientTape() as tape:
        tape.watch(gradient)
        total = tf.reduce_sum(chosen(gradient))
    with pytest.raises(LookupError, match="TfcommxSelect"):
        tape.gradient(total, gradient)


@pytest.mark.parametrize("dtype", ["float64", "int32", "complex64"])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    gradient, residual = tf.cast(GRADIENT, dtype), tf.Variable(tf.zeros([8]))
    name = gradient.dtype.name.replace("float64", "double")
    for call in (
        lambda: chosen(gradient),
        lambda: select.select_with_residual(gradient, residual, 2, 0, "mstopk"),
        lambda: lars.squared_norms([gradient]),
        lambda: dense.write(gradient, residual, "float16"),
        lambda: low_bits.write(gradient, residual, "int8", 8, 8),
        lambda: wire.encode(Sparse(tf.range(8), gradient, 8), "pair32"),
        lambda: sparse.merge(tf.range(8), gradient, 8),
    ):
        with pytest.raises((tf.errors.InvalidArgumentError, TypeError), match=name):
            call()
    assert not residual.numpy().any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_vector_in_16_bits_is_taken_or_refused_by_name(dtype: str) -> None:
    gradient, residual = tf.cast(GRADIENT, dtype), tf.Variable(tf.zeros([8]))
    assert chosen(gradient).numpy().tolist() == [-8, 7]
    name = dtype.replace("float16", "half") if dtype == "float16" else dtype
    with pytest.raises((tf.errors.InvalidArgumentError, TypeError), match=name):
        dense.write(gradient, residual, "float16")
