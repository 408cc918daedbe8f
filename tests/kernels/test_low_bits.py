"""A vector in codes of 8 to 1 bits: native equals definition, and nothing is lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from tensorflow.python.framework import op_def_registry
from vectors import KINDS, make

from tfcommx.core.wire_formats import DENSE_CODE_BLOCKS, DENSE_CODES
from tfcommx.kernels import loader, low_bits

IMPLEMENTATIONS = {
    "native": SimpleNamespace(write=low_bits.write, add=low_bits.add_and_write, read=low_bits.read),
    "definition": SimpleNamespace(
        write=low_bits.write_definition,
        add=low_bits.add_and_write_definition,
        read=low_bits.read_definition,
    ),
}
# Others below compare the definition with the native op, bit for bit
every_implementation = pytest.mark.parametrize(
    "implementation", [case(name, kept=name == "native") for name in IMPLEMENTATIONS]
)
every_wire = pytest.mark.parametrize("wire", DENSE_CODES)
# Entries of a shard, shards, entries of the vector that are padding
BLOCKS = [(128, 2, 0), (129, 3, 2), (512, 2, 0), (513, 3, 2)]
LENGTHS = [(1, 1, 0), *BLOCKS, (40, 3, 100), (5_003, 2, 1)]
LONG = [(300_007, 1, 5)]


def test_the_native_ops_have_the_same_table() -> None:
    assert loader.library() is not None
    for op in ("TfcommxLowBitsWrite", "TfcommxLowBitsAdd", "TfcommxLowBitsRead"):
        attributes = {one.name: one for one in op_def_registry.get(op).attr}
        allowed = attributes["type"].allowed_values.list.s
        assert [name.decode() for name in allowed] == list(DENSE_CODES), op


@pytest.mark.parametrize(
    ("wire", "kind", "lengths"),
    [
        case(wire, kind, lengths, kept=(number + turn) % (3 if lengths is LENGTHS else 6) == 0)
        for number, wire in enumerate(DENSE_CODES)
        for turn, kind in enumerate(KINDS)
        for lengths in (LENGTHS, LONG)
    ],
)
def test_native_equals_definition(wire: str, kind: str, lengths: list[tuple[int, ...]]) -> None:
    """Bit for bit: words, residuals and read entries; also in shards with an incomplete block."""
    for entries, shards, padding in lengths:
        size = shards * entries
        gradient, kept = make(kind, size, 1), make("laplace", size, 2) * np.float32(1e-3)
        kept[size - padding :] = gradient[size - padding :] = 0
        found = {}
        for name, one in IMPLEMENTATIONS.items():
            residual = tf.Variable(kept)
            before = residual.read_value()  # must not change with the variable
            words = one.write(tf.constant(gradient), residual, wire, entries, size - padding)
            first = residual.numpy()
            np.testing.assert_array_equal(before, kept)
            start = size - entries
            shard = tf.reshape(words, [shards, -1])[-1]
            parts = tf.concat([shard, shard, shard], axis=0)
            total = one.add(parts, residual, wire, entries, start, entries - padding)
            read = [one.read(words, wire, entries), one.read(total, wire, entries, 1 / 3)]
            found[name] = [words, first, total, residual.numpy(), *read]
        for mine, right in zip(*found.values(), strict=True):
            assert np.asarray(mine).tobytes() == np.asarray(right).tobytes()
        _, first, _, second, *_ = found["native"]
        for stays in (first, second):
            assert not stays[size - padding :].any() and np.isfinite(stays).all()
        np.testing.assert_array_equal(first[:start], second[:start])


def test_magnitudes_are_added_in_the_definitions_order() -> None:
    """A number between two steps, and two that raise the step only if added to each other first.

    Each is less than half of the large one's last bit, and near it in the order of additions. Other
    numbers show another order once in 65,000 blocks.
    """
    length = DENSE_CODE_BLOCKS["int1"]
    numbers, blocks = np.random.default_rng(0), np.zeros([500, length], np.float32)
    for block in blocks:
        large, near, far = numbers.integers(length), *(2 ** numbers.integers(9, size=2))
        block[[large ^ near ^ far, large ^ near]] = 0.6 * 2.0**-24
        block[large] = 1 + 2.0**-8
    given = tf.constant(blocks.ravel())
    found = [
        one.write(given, tf.Variable(tf.zeros_like(given)), "int1", length, blocks.size)
        for one in IMPLEMENTATIONS.values()
    ]
    np.testing.assert_array_equal(*found)
    steps = tf.reshape(found[0], [len(blocks), -1])[:, 0].numpy()
    assert len(set(steps)) == 2


@pytest.mark.parametrize("kind", [one for one in KINDS if one not in ("not_finite", "all_nan")])
@every_wire
@every_implementation
def test_written_plus_kept_is_what_came(implementation: str, wire: str, kind: str) -> None:
    """To float32 rounding beside the largest of a block."""
    one, size = IMPLEMENTATIONS[implementation], 3 * 1_001
    gradient, kept = make(kind, size, 3), make("normal", size, 4) * np.float32(0.1)
    gradient = np.clip(np.nan_to_num(gradient), -3e38, 3e38)
    residual = tf.Variable(kept)
    words = one.write(tf.constant(gradient), residual, wire, 1_001, size)
    written = one.read(words, wire, 1_001).numpy().astype(np.float64)
    whole = (gradient + kept).astype(np.float64)
    np.testing.assert_allclose(
        written + residual.numpy(), whole, rtol=0, atol=2**-23 * np.abs(whole).max()
    )
    # The squared error: see ops/kernels/low_bits.h
    assert np.square(residual.numpy().astype(np.float64)).sum() < np.square(whole).sum()


@pytest.mark.parametrize(("wire", "left"), [("int1", 0.363), ("int2", 0.119)])
def test_little_is_left_of_normal_numbers(wire: str, left: float) -> None:
    """Of four equidistant levels no others leave less (Max, 1960): 0.1188."""
    numbers = make("normal", 128 * 5_000, 5)
    residual = tf.Variable(tf.zeros_like(numbers))
    low_bits.write(tf.constant(numbers), residual, wire, len(numbers), len(numbers))
    share = np.square(residual.numpy()).sum() / np.square(numbers).sum()
    assert share == pytest.approx(left, abs=0.004)


@pytest.mark.parametrize(("wire", "largest"), [("int8", 127), ("int4", 7)])
def test_an_error_is_at_most_half_a_step(wire: str, largest: int) -> None:
    numbers = make("laplace", 1_003, 6)
    residual = tf.Variable(tf.zeros_like(numbers))
    low_bits.write(tf.constant(numbers), residual, wire, 1_003, 1_003)
    length = DENSE_CODE_BLOCKS[wire]
    for block in range(0, 1_003, length):
        part = slice(block, block + length)
        step = np.abs(numbers[part]).max() / largest
        # The step is a bfloat16
        assert (np.abs(residual.numpy()[part]) <= step * (0.5 + largest * 2**-8)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every_wire
@every_implementation
def test_a_block_with_a_bad_entry_is_nan_and_its_residual_stays(
    implementation: str, wire: str, bad: float
) -> None:
    one, length = IMPLEMENTATIONS[implementation], DENSE_CODE_BLOCKS[wire]
    entries = 2 * length + 44
    gradient, kept = make("normal", entries, 7), make("normal", entries, 8)
    gradient[length + 72] = bad
    residual = tf.Variable(kept)
    words = one.write(tf.constant(gradient), residual, wire, entries, entries)
    read, block = one.read(words, wire, entries).numpy(), slice(length, 2 * length)
    assert np.isnan(read[block]).all() and np.isfinite(np.delete(read, block)).all()
    np.testing.assert_array_equal(residual.numpy()[block], kept[block])
    assert np.isfinite(residual.numpy()).all() and (residual.numpy() != kept)[:length].all()
    stays = residual.numpy()
    total = one.add(tf.concat([words, words], 0), residual, wire, entries, 0, entries)
    assert np.isnan(one.read(total, wire, entries).numpy()[block]).all()
    np.testing.assert_array_equal(residual.numpy()[block], stays[block])


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-37, 2.0**-100, 3.4028235e38, -3.4e38])
@every_wire
@every_implementation
def test_numbers_at_the_ends_of_float32(implementation: str, wire: str, value: float) -> None:
    """Numbers that are too small stay in the residual, and the largest remain finite."""
    one, residual = IMPLEMENTATIONS[implementation], tf.Variable(tf.zeros([130]))
    words = one.write(tf.fill([130], tf.constant(value, tf.float32)), residual, wire, 130, 130)
    read, stays = one.read(words, wire, 130).numpy(), residual.numpy()
    assert np.isfinite(read).all() and np.isfinite(stays).all()
    if abs(value) < 2.0**-100:
        assert not read.any()
        np.testing.assert_array_equal(stays, np.float32(0 if abs(value) < 1e-38 else value))
    else:
        np.testing.assert_allclose(read + stays.astype(np.float64), value, rtol=1e-6)
        assert (np.abs(stays) < 0.5 * abs(value)).all()


@every_wire
def test_parts_are_added_in_float32_and_in_their_order(wire: str) -> None:
    """Numbers whose sum depends on the order; the residual comes last."""
    parts = [tf.constant(make("normal", 500, seed) * np.float32(10.0**seed)) for seed in range(5)]
    words = [low_bits.write(part, tf.Variable(tf.zeros([500])), wire, 500, 500) for part in parts]
    residual = tf.Variable(make("normal", 500, 9))
    right = np.float32(0)
    for part in words:
        right = right + low_bits.read(part, wire, 500).numpy()
    expected = tf.Variable(right)
    one = low_bits.write(residual.read_value(), expected, wire, 500, 500)
    np.testing.assert_array_equal(
        low_bits.add_and_write(tf.concat(words, 0), residual, wire, 500, 0, 500), one
    )
    np.testing.assert_array_equal(residual, expected)


def test_another_buckets_residual_and_parts_of_shards_are_refused() -> None:
    words = low_bits.write(tf.ones([4]), tf.Variable(tf.zeros([4])), "int4", 2, 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\b6 entries\b"):
        low_bits.write(tf.ones([6]), tf.Variable(tf.zeros([4])), "int4", 2, 6)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\b5 entries\b"):
        low_bits.add_and_write(words, tf.Variable(tf.zeros([4])), "int4", 2, 3, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\b2 numbers"):
        low_bits.write(tf.ones([5]), tf.Variable(tf.zeros([5])), "int4", 2, 5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\b17 numbers"):
        low_bits.read(words[1:], "int4", 2)


def test_lengths_are_known_while_tracing() -> None:
    """Collectives count their bytes then."""
    residual = tf.Variable(tf.zeros([600]))

    @tf.function
    def all_three(gradient: tf.Tensor) -> tf.Tensor:
        words = low_bits.write(gradient, residual, "int1", 300, 600)
        assert words.shape == [34]
        total = low_bits.add_and_write(words, residual, "int1", 300, 0, 300)
        assert total.shape == [17]
        read = low_bits.read(total, "int1", 300)
        assert read.shape == [300]
        return read

    assert all_three(tf.ones([600])).numpy().tolist() == [2.0] * 300
