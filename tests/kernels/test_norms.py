"""Laws of the norms: one order of additions, whatever the machine; near float64; nothing hidden."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT
from native_files import compiled

from tfcommx.kernels.lars import CHUNK, LANES, squared_norms, squared_norms_definition

DTYPES = ["float32", "float16", "bfloat16"]
SIZES = [0, 1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7, 300_001]


def in_order(vector):
    """The order of ops/kernels/norms.h in NumPy: lanes, then chunks, each folded."""
    flat = np.asarray(vector, np.float32).reshape(-1)
    padded = np.pad(flat, [0, -len(flat) % CHUNK]).reshape(-1, CHUNK // LANES, LANES)
    lanes = np.zeros([len(padded), LANES], np.float32)
    for row in range(CHUNK // LANES):
        lanes += padded[:, row] * padded[:, row]
    return folded(np.array([folded(chunk) for chunk in lanes], np.float32))


def folded(parts):
    while len(parts) > 1:
        half = (len(parts) + 1) // 2
        added = parts[: len(parts) - half] + parts[half:]
        parts = np.concatenate([added, parts[len(parts) - half : half]])
    return parts[0] if len(parts) else np.float32(0)


def drawn(sizes, dtype, seed):
    random = np.random.default_rng(seed)
    return [tf.cast(random.standard_normal(n, np.float32), dtype) for n in sizes]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("implementation", [squared_norms, squared_norms_definition])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adds_in_the_order_that_the_header_says(implementation, dtype):
    tensors = drawn(SIZES, dtype, 3)
    expected = [in_order(tensor.numpy().astype(np.float32)) for tensor in tensors]
    np.testing.assert_array_equal(implementation(tensors).numpy(), np.array(expected, np.float32))


@pytest.mark.usefixtures("library")
@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=6),
    scale=st.integers(-15, 15),
    seed=st.integers(0, 2**31),
)
def test_native_equals_definition(sizes, scale, seed):
    tensors = [
        tf.cast(tensor * 10.0**scale, DTYPES[i % 3])
        for i, tensor in enumerate(drawn(sizes, tf.float32, seed))
    ]
    np.testing.assert_array_equal(squared_norms(tensors), squared_norms_definition(tensors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_float64(dtype):
    """A plain float32 sum of as many equal squares is wrong in the third digit."""
    for tensor in [*drawn([4_000_003], dtype, 5), tf.fill([4_000_003], tf.cast(1.1, dtype))]:
        exact = np.sum(np.square(tensor.numpy().astype(np.float64)))
        assert abs(squared_norms([tensor]).numpy()[0] - exact) <= 1e-6 * exact


def test_bits_depend_on_neither_threads_nor_neighbours_nor_alignment():
    tensors = drawn([700_001, 5, 123_457], "float32", 9)
    together = squared_norms(tensors).numpy()
    for _ in range(5):
        np.testing.assert_array_equal(squared_norms(tensors).numpy(), together)
    alone = [squared_norms([tensor]).numpy()[0] for tensor in tensors]
    np.testing.assert_array_equal(alone, together)
    shifted = tf.concat([tf.zeros([3]), tensors[0]], 0)
    views = tf.split(shifted, [3, 700_001])[1], shifted[3:]
    np.testing.assert_array_equal(squared_norms(views).numpy(), [together[0]] * 2)


@pytest.mark.parametrize("implementation", [squared_norms, squared_norms_definition])
def test_not_finite_entries_come_through(implementation):
    """Also in the last place, where a part of a row is."""
    vector = np.ones(CHUNK + 3, np.float32)
    found = []
    for value in (np.nan, np.inf, -np.inf, 1e20):
        for place in (0, CHUNK + 2):
            changed = vector.copy()
            changed[place] = value
            found.append(tf.constant(changed))
    squares = implementation(found).numpy()
    assert np.isnan(squares[:2]).all()
    assert (squares[2:] == np.inf).all()


def test_shape_is_known_while_tracing():
    @tf.function
    def traced(one, other):
        squares = squared_norms([one, other])
        assert squares.shape == (2,)
        return squares

    np.testing.assert_array_equal(traced(tf.constant([3.0]), tf.constant([[2.0]])), [9, 4])


@pytest.mark.parametrize("optimise", [case(("-O2",), kept=False), ("-O3", "-mfma")], ids=" ".join)
def test_all_instruction_sets_agree(optimise):
    """A processor runs only the fastest loop, so this test calls all of them."""
    flags = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", *optimise]
    sources = sorted((ROOT / "ops" / "kernels").glob("norms_chunk_*.cc"))
    files = [ROOT / "tests" / "norms_check.cc", *sources]
    command = ["g++", *flags, f"-I{ROOT / 'ops'}", *map(str, files)]
    program = compiled(command, "norms_check")
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and "checked portable" in done.stdout, done.stdout
