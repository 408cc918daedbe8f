"""Buffers that other ranks, networks or plans have damaged are refused, or read as they are.

The buffers are valid ones with a few changed words, or of another format, length or plan. The
kernels run under sanitizers in tests/kernels/test_hostile_bytes.py.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.core import SPARSE_WIRES, Sparse
from tfcommx.core.wire_formats import DENSE_CODES, SPARSE_FORMATS, dense_code_words, wire_words
from tfcommx.kernels import low_bits, sparse, wire

# (k, size): one entry, all entries, blocks of 65,536, low bits of one word and of two
PLANS = [(1, 1), (40, 40), (65, 70_001), (33, 4_000), (300, 200_000)]
EXTREMES = np.array([0, -1, 1, 2**31 - 1, -(2**31), 65_535, 65_536, 0x7F80, -128], np.int64)
# Denormal numbers are zero in some threads
DENORMAL = 128 * 2.0**-126


def written(draw: np.random.Generator, k: int, size: int, name: str) -> np.ndarray:
    """Return the words of k random entries."""
    indices = np.sort(draw.choice(size, k, replace=False)).astype(np.int32)
    values = draw.standard_normal(k).astype(np.float32)
    return wire.encode(Sparse(tf.constant(indices), tf.constant(values), size), name).numpy()


def damaged(draw: np.random.Generator, words: np.ndarray) -> np.ndarray:
    """Return words of which one to three are others: one bit, an extreme, a neighbour, anything."""
    changed = words.copy()
    for at in draw.integers(0, len(words), draw.integers(1, 4)):
        changed[at] = draw.choice(
            [
                int(changed[at]) ^ 1 << draw.integers(31),
                draw.choice(EXTREMES),
                words[at - 1],
                draw.integers(-(2**31), 2**31),
            ]
        )
    return changed


def check(words: np.ndarray, k: int, size: int, name: str) -> bool:
    """Require a refusal, or the definition's entries in range and order; True if refused."""
    try:
        indices, values = wire.decode(tf.constant(words), k, size, name)
    except tf.errors.InvalidArgumentError:
        return True
    by_buffer = indices.numpy().reshape(-1, k)
    assert (by_buffer >= 0).all() and (by_buffer < size).all()
    if SPARSE_FORMATS[name].indices != "pair":
        assert (np.diff(by_buffer, axis=1) > 0).all()
    expected = wire.decode_definition(tf.constant(words), k, size, name)
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(values, expected[1], rtol=0, atol=DENORMAL)
    merged = sparse.merge(indices, values, size, k)
    np.testing.assert_array_equal(merged, sparse.merge_definition(indices, values, size))
    return False


@pytest.mark.parametrize("name", SPARSE_WIRES)
def test_damaged_words_are_refused_or_read_as_they_are(name: str) -> None:
    draw, refused = np.random.default_rng([SPARSE_WIRES.index(name), 1]), 0
    for turn in range(30):
        k, size = PLANS[turn % len(PLANS)]
        buffers = [written(draw, k, size, name) for _ in range(2)]
        assert not check(np.concatenate(buffers), k, size, name)
        refused += check(np.concatenate([buffers[0], damaged(draw, buffers[1])]), k, size, name)
    assert refused > 3


@pytest.mark.parametrize("name", SPARSE_WIRES)
def test_buffers_of_another_length_format_or_plan_are_refused_or_read_as_they_are(
    name: str,
) -> None:
    draw = np.random.default_rng([SPARSE_WIRES.index(name), 2])
    for k, size in PLANS:
        words = written(draw, k, size, name)
        for cut in (words[:-1], words[1:], np.append(words, words[:1]), words[: len(words) // 2]):
            if len(cut) % len(words):
                with pytest.raises(tf.errors.InvalidArgumentError, match="`words`"):
                    wire.decode(tf.constant(cut), k, size, name)
        for other in SPARSE_WIRES:
            # In a buffer of the right length, as a rank of another version could send it
            foreign = np.resize(written(draw, k, size, other), sum(wire_words(k, size, name)))
            check(foreign, k, size, name)
        for other_size in (1, k, size - 1, size + 1, 2 * size, 2**31 - 1):
            length = sum(wire_words(k, other_size, name))
            if other_size < 1 or length > 10 * len(words) + 100_000:
                continue
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                cut = tf.constant(np.resize(words, length))
                indices, _ = wire.decode(cut, k, other_size, name)
                assert (indices.numpy() >= 0).all() and (indices.numpy() < other_size).all()


@pytest.mark.parametrize("name", ["block16/float16", "elias/float32", "elias/int4"])
def test_indices_that_do_not_ascend_are_refused(name: str) -> None:
    """Two entries of one index, or in another order, were added on CPUs; a GPU made NaN of them.

    Either is a sign of damage, because these formats have the indices of a selection.
    """
    k, size = 4, 70_001
    counts, positions, _ = wire_words(k, size, name)
    entries = Sparse(tf.constant([8, 9, 10, 11]), tf.ones([k]), size)
    words = wire.encode(entries, name).numpy()
    places = words[counts : counts + positions]
    bits = places.view(np.uint16) if name.startswith("block16") else None
    if bits is not None:
        bits[1] = bits[0]
    else:
        places[:] = 0  # The low bits: all of them in one bucket of high bits
    for buffers, bad in ((words, 0), (np.concatenate([wire.encode(entries, name), words]), 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"ascending.*[Bb]uffer {bad}\b"):
            wire.decode(tf.constant(buffers), k, size, name)


@pytest.mark.parametrize("codes", DENSE_CODES)
def test_damaged_codes_of_a_vector_are_numbers(codes: str) -> None:
    """Any words are numbers: native equals definition, and a step that is NaN is a block of NaN."""
    draw = np.random.default_rng(3)
    for entries in (1, 127, 128, 129, 511, 512, 513, 1_000):
        words = sum(dense_code_words(entries, codes))
        given = draw.integers(-(2**31), 2**31, [3, words]).astype(np.int32)
        # In the first word: a step that is NaN, before it one that is negative and infinite
        given[1, 0], given[2, 0] = 0x7FC0FF80, 0xFF807FC0 - 2**32
        read = low_bits.read(tf.constant(given.ravel()), codes, entries, 0.5)
        expected = low_bits.read_definition(tf.constant(given.ravel()), codes, entries, 0.5)
        np.testing.assert_allclose(read, expected, rtol=0, atol=DENORMAL)
        residual, other = (tf.Variable(tf.ones([entries])) for _ in range(2))
        total = low_bits.add_and_write(
            tf.constant(given.ravel()), residual, codes, entries, 0, entries
        )
        right = low_bits.add_and_write_definition(
            tf.constant(given.ravel()), other, codes, entries, 0, entries
        )
        assert np.isfinite(residual.numpy()).all()
        np.testing.assert_array_equal(total, right)
        np.testing.assert_array_equal(residual, other)
        with pytest.raises(tf.errors.InvalidArgumentError, match="`words`"):
            low_bits.read(tf.constant(given.ravel()[:-1]), codes, entries)
