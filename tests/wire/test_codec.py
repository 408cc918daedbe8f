"""Written entries are read back, in exactly the bytes promised.

Rounding errors are returned.
"""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT
from tensorflow.python.framework import op_def_registry

from tfcommx.core import SPARSE_WIRES, VALUE_DTYPES, Sparse
from tfcommx.core.wire_formats import (
    BLOCK,
    CODE_BITS,
    INDEX_WORDS,
    SPARSE_FORMATS,
    bitmap_bits,
    low_bits,
    wire_words,
)
from tfcommx.kernels import loader
from tfcommx.kernels.wire import decode, decode_definition, encode, encode_definition
from tfcommx.wire import codec, formats

IMPLEMENTATIONS = {
    "native": SimpleNamespace(encode=encode, decode=decode),
    "definition": SimpleNamespace(encode=encode_definition, decode=decode_definition),
}
# Others below compare the definition with the native op, bit for bit
every_implementation = pytest.mark.parametrize(
    "implementation", [case(name, kept=name == "native") for name in IMPLEMENTATIONS]
)
every_wire = pytest.mark.parametrize("name", SPARSE_WIRES)
CODED = [name for name in SPARSE_WIRES if SPARSE_FORMATS[name].values in CODE_BITS]
NARROW = [
    name for name in SPARSE_WIRES if SPARSE_FORMATS[name].values != "float32" and name not in CODED
]


def test_the_native_ops_have_the_same_table() -> None:
    assert loader.library() is not None
    for op, attribute, names in (
        ("TfcommxWireEncode", "format", SPARSE_FORMATS),
        ("TfcommxWireDecode", "format", SPARSE_FORMATS),
        ("TfcommxWireRound", "type", CODE_BITS),
    ):
        attributes = {one.name: one for one in op_def_registry.get(op).attr}
        allowed = attributes[attribute].allowed_values.list.s
        assert [name.decode() for name in allowed] == list(names), op


def sparse(k: int, size: int, seed: int = 0) -> Sparse:
    numbers = np.random.default_rng(seed)
    indices = np.sort(numbers.choice(size, k, replace=False)).astype(np.int32)
    return Sparse(
        tf.constant(indices), tf.constant(numbers.normal(size=k).astype(np.float32)), size
    )


@every_wire
def test_a_merge_multiplies_the_entries_that_it_adds(name: str) -> None:
    buffers = tf.concat([codec.encode(sparse(5, 64, seed), name) for seed in (1, 2)], axis=0)
    # A power of 2, whose products are exact
    np.testing.assert_array_equal(
        codec.merge(buffers, 5, 64, name, factor=0.25), 0.25 * codec.merge(buffers, 5, 64, name)
    )


def test_a_merge_knows_the_length_of_its_runs() -> None:
    """Without it the merge leaves a GPU, which adds in any order unless runs ascend."""
    words = codec.encode(sparse(5, 64), "pair32")
    merge = tf.function(
        lambda: codec.merge(words, 5, 64, "pair32"), autograph=False
    ).get_concrete_function()
    (op,) = [op for op in merge.graph.get_operations() if op.type == "TfcommxMerge"]
    assert op.get_attr("k") == 5 and not op.device


@pytest.mark.parametrize(
    ("k", "size"),
    [(1, 1), (1, 200_000), (7, 65_536), (65_536, 65_536), (65_537, 65_537), (333, 300_001), (6, 9)],
)
@every_wire
@every_implementation
def test_what_is_written_is_read_back(implementation: str, name: str, k: int, size: int) -> None:
    """Three ranks' buffers, one after another; k odd and even, blocks full and empty."""
    written = [codec.rounded(sparse(k, size, rank), name)[0] for rank in range(3)]
    buffers = [IMPLEMENTATIONS[implementation].encode(one, name) for one in written]
    for buffer in buffers:
        assert buffer.dtype == tf.int32 and 4 * len(buffer) == formats.size_bytes(k, size, name)
    indices, values = IMPLEMENTATIONS[implementation].decode(
        tf.concat(buffers, axis=0), k, size, name
    )
    np.testing.assert_array_equal(indices, np.concatenate([one.indices for one in written]))
    np.testing.assert_array_equal(values, np.concatenate([one.values for one in written]))


@every_wire
@every_implementation
def test_buffers_of_several_shards_point_into_the_whole(implementation: str, name: str) -> None:
    """Three shards, two ranks' buffers of each."""
    k, size = 33, 70_001
    written = [codec.rounded(sparse(k, size, number), name)[0] for number in range(6)]
    buffers = tf.concat(
        [IMPLEMENTATIONS[implementation].encode(one, name) for one in written], axis=0
    )
    indices, values = IMPLEMENTATIONS[implementation].decode(buffers, k, size, name, 3)
    np.testing.assert_array_equal(
        indices,
        np.concatenate([one.indices + number // 2 * size for number, one in enumerate(written)]),
    )
    np.testing.assert_array_equal(values, np.concatenate([one.values for one in written]))


def test_a_format_of_another_package_is_read_by_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three shards, two ranks' buffers of each: indices point into the vector of all shards."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "testing"))
    name, k, size = "pairs_format:PAIRS", 5, 64
    entries = [sparse(k, size, number) for number in range(6)]
    written, errors = zip(*(codec.rounded(one, name) for one in entries), strict=True)
    buffers = tf.concat([codec.encode(one, name) for one in written], axis=0)
    assert 4 * len(buffers) == 6 * formats.size_bytes(k, size, name)
    indices, values = codec.decode(buffers, k, size, name, shards=3)
    np.testing.assert_array_equal(
        indices,
        np.concatenate([one.indices + number // 2 * size for number, one in enumerate(entries)]),
    )
    np.testing.assert_array_equal(
        values + tf.concat(errors, axis=0), np.concatenate([one.values for one in entries])
    )
    assert np.any(errors)


@every_wire
@every_implementation
def test_no_entry_falls_off_the_ends_of_a_block(implementation: str, name: str) -> None:
    size = 3 * BLOCK + 5
    edges = [0, 65_535, 65_536, 131_071, 131_072, 196_607, 196_608, size - 1]
    entries = Sparse(tf.constant(edges, tf.int32), tf.range(1.0, 9.0), size)
    indices, values = IMPLEMENTATIONS[implementation].decode(
        IMPLEMENTATIONS[implementation].encode(entries, name), 8, size, name
    )
    assert indices.numpy().tolist() == edges
    np.testing.assert_array_equal(values, codec.rounded(entries, name)[0].values)


@every_wire
@every_implementation
def test_the_length_is_known_while_tracing(implementation: str, name: str) -> None:
    """Otherwise an EnsureShape would have to state it.

    That op takes int32 from the GPU to the host and back.
    """

    @tf.function
    def written(entries: Sparse) -> tf.Tensor:
        words = IMPLEMENTATIONS[implementation].encode(
            Sparse(entries.indices, entries.values, 70_000), name
        )
        assert words.shape == [sum(wire_words(7, 70_000, name))]
        return words

    written(sparse(7, 70_000))


def test_bytes_by_hand() -> None:
    """1,000 of 200,000 entries, which are 4 blocks.

    999 need a half word of padding in each 16-bit part.
    """
    by_hand = {
        "pair32": (8000, 7992),
        "pair16/float16": (6000, 5996),
        "pair16/bfloat16": (6000, 5996),
        "block16/float32": (6016, 6012),
        "block16/float16": (4016, 4016),
        "block16/bfloat16": (4016, 4016),
        # 2,562 bits in a bitmap and 7 low bits an entry: 1,200 bytes in whole words
        "elias/float32": (5200, 5196),
        "elias/float16": (3200, 3200),
        # 64 bytes of steps
        "elias/int8": (2264, 2264),
        "elias/int4": (1764, 1764),
    }
    for name, expected in by_hand.items():
        sizes = tuple(formats.size_bytes(k, 200_000, name) for k in (1000, 999))
        assert sizes == expected, name
    # Other formats combine these
    ways, dtypes = zip(*(SPARSE_FORMATS[name] for name in by_hand), strict=True)
    assert set(ways) == set(INDEX_WORDS) and {*VALUE_DTYPES, *CODE_BITS} == set(dtypes)


@every_wire
def test_a_price_may_ask_for_an_entry_of_a_vector_of_none(name: str) -> None:
    """Solvers of the merging price empty groups; a bucket has at least one entry."""
    assert formats.size_bytes(1, 0, name) <= 12


def test_block16_moves_at_most_six_tenths_of_pair32() -> None:
    for size, density in [(25_000_000, 0.01), (25_000_000, 0.001), (3_000_000, 0.01)]:
        k = int(size * density)
        assert formats.size_bytes(k, size, "block16/float16") <= 0.6 * formats.size_bytes(
            k, size, "pair32"
        )


@pytest.mark.parametrize("size", [1, 2, 100, 65_537, 25_000_000, 2**31 - 1])
def test_elias_needs_at_most_two_bits_more_than_the_logarithm(size: int) -> None:
    """The logarithm of size / k: the least that k entries can be told apart by is about 1.4 more.

    It is the lowest of all numbers of low bits, too.
    """
    for k in {1, size // 7 + 1, size // 2 + 1, size // 100 + 1, size}:
        bits = k * low_bits(k, size) + bitmap_bits(k, size)
        assert bits <= k * (2 + np.log2(size / k)) + 1e-6
        others = [k * low + k + ((size - 1) >> low) for low in range(31)]
        assert bits <= min(others) + 1


@pytest.mark.parametrize("name", NARROW)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False))
def test_rounding_loses_nothing(name: str, value: float) -> None:
    """The sent value plus the rounding error is the value, in exact arithmetic.

    For all values whose difference float32 can hold.
    """
    if SPARSE_FORMATS[name].values == "bfloat16" and 0 < abs(value) < 2.0**-102:
        # The difference is below the smallest normal float32, and the processor may flush it
        return
    one, error = codec.rounded(Sparse(tf.constant([0]), tf.constant([value]), 1), name)
    sent = float(one.values[0])
    assert np.isfinite(sent)
    assert Fraction(sent) + Fraction(float(error[0])) == Fraction(float(np.float32(value)))
    _, read = decode(codec.encode(one, name), 1, 1, name)
    assert float(read[0]) == sent


@pytest.mark.parametrize("name", NARROW)
def test_rounding_is_to_nearest_and_sees_that_something_is_left(name: str) -> None:
    values = np.random.default_rng(3).normal(size=1000).astype(np.float32)
    one, error = codec.rounded(Sparse(tf.range(1000), tf.constant(values), 1000), name)
    bits = 11 if SPARSE_FORMATS[name].values == "float16" else 8
    assert np.count_nonzero(error) > 900
    assert (np.abs(error) <= np.abs(values) * 2.0**-bits).all()
    np.testing.assert_array_equal(one.values + error, values)


@every_wire
@every_implementation
def test_values_that_are_not_finite_survive_and_leave_nothing(
    implementation: str, name: str
) -> None:
    values = tf.constant([np.nan, np.inf, -np.inf, 1.0])
    one, error = codec.rounded(Sparse(tf.range(4), values, 4), name)
    _, read = IMPLEMENTATIONS[implementation].decode(
        IMPLEMENTATIONS[implementation].encode(one, name), 4, 4, name
    )
    np.testing.assert_array_equal(read, one.values)
    assert error is None or not error.numpy()[:3].any()
    if name in CODED:
        assert np.isnan(read[:3]).all() and read[3] + error[3] == 1 and abs(error[3]) < 0.004
    else:
        np.testing.assert_array_equal(read, values)
        assert error is None or not error.numpy().any()


@pytest.mark.parametrize(
    ("value", "sent"),
    [(65_519.0, 65_504), (1e6, 65_504), (-1e6, -65_504), (2.0**29, 2**15), (2.0**39, 0), (3e38, 0)],
)
def test_a_finite_value_beyond_float16_is_cut_and_the_rest_stays(value: float, sent: float) -> None:
    one, error = codec.rounded(Sparse(tf.constant([0]), tf.constant([value]), 1), "pair16/float16")
    assert (float(one.values[0]), float(error[0])) == (sent, float(np.float32(value)) - sent)


@every_wire
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-7, 1e4, 1e30])
def test_native_equals_definition_bit_for_bit(name: str, scale: float) -> None:
    """Values that were not rounded before, so that the kernel rounds.

    Normal ones, denormal in float16, too large for it; all exponents.
    """
    numbers = np.random.default_rng(5)
    indices = np.sort(numbers.choice(1_000_000, 20_001, replace=False)).astype(np.int32)
    values = (numbers.normal(size=20_001) * scale).astype(np.float32)
    values[:6] = [0, -0.0, np.inf, -np.inf, 65519.996, 2.0**-25]
    entries = Sparse(tf.constant(indices), tf.constant(values), 1_000_000)
    words = encode(entries, name)
    np.testing.assert_array_equal(words, encode_definition(entries, name))
    for one, other in zip(
        decode(words, 20_001, 1_000_000, name),
        decode_definition(words, 20_001, 1_000_000, name),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["block16/float16", "block16/bfloat16"])
def test_every_16_bit_value_is_read_and_written_as_the_definition_does(name: str) -> None:
    every = tf.constant(np.arange(65536, dtype=np.uint16).view(np.int32))
    words = tf.concat(
        [[65536], tf.constant(np.arange(65536, dtype=np.uint16).view(np.int32)), every], axis=0
    )
    _, values = decode(words, 65536, 65536, name)
    _, expected = decode_definition(words, 65536, 65536, name)
    np.testing.assert_array_equal(values, expected)
    # Smaller ones may be flushed by the definition
    finite = np.isfinite(expected) & (np.abs(expected) >= 2.0**-126)
    again = encode(Sparse(tf.range(65536), values, 65536), name).numpy()[-32768:].view(np.uint16)
    np.testing.assert_array_equal(again[finite], np.arange(65536)[finite])


@pytest.mark.parametrize("name", ["block16/float16", "elias/int8"])
@pytest.mark.parametrize("indices", [[0, 5], [-1, 2], [3, 2], [2, 2]])
def test_indices_out_of_range_or_order_are_refused(indices: list[int], name: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 5\).*TfcommxWireEncode"):
        encode(Sparse(tf.constant(indices), tf.ones(2), 5), name)


@pytest.mark.parametrize("name", ["block16/float16", "elias/int4"])
def test_a_buffer_of_another_plan_is_refused(name: str) -> None:
    words = encode(Sparse(tf.constant([1, 4]), tf.ones(2), 5), name)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`words`.*\[3\]|\b5\b.*\[0, 50\)"):
        decode(words, 5, 50, name)
    for changed in (1, 2**20):  # A count, or bits of the bitmap
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"[Bb]uffer 1\b"):
            decode(tf.concat([words, [changed], words[1:]], axis=0), 2, 5, name)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`words`.*\b2\b"):
        decode(words, 2, 5, name, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"2\^31.*\b1073741824\b"):
        decode(words, 2, 2**30, name, 2)


@pytest.mark.parametrize("width", [0, 1, 2, 3, 5, 7, 8, 9, 11, 16])
@pytest.mark.parametrize("k", [1, 8, 63, 64, 65, 200])
def test_low_bits_of_every_width_are_written_as_the_definition_does(width: int, k: int) -> None:
    """Whole blocks of 64 and their rests; neighbours, and gaps as wide as the vector."""
    size = k * 2**width + 2**width // 2
    assert low_bits(k, size) == width
    spread = sparse(k, size, seed=width).indices.numpy()
    for indices in (spread, np.arange(k), np.arange(size - k, size)):
        entries = Sparse(tf.constant(indices, tf.int32), tf.ones(k), size)
        words = encode(entries, "elias/int8")
        np.testing.assert_array_equal(words, encode_definition(entries, "elias/int8"))
        np.testing.assert_array_equal(decode(words, k, size, "elias/int8")[0], indices)


def test_elias_reaches_to_the_last_index_of_the_longest_vector() -> None:
    size, indices = 2**31 - 1, [0, 2**30, 2**31 - 3, 2**31 - 2]
    for few in (indices, indices[-1:], indices[:1]):
        words = encode(Sparse(tf.constant(few), tf.ones(len(few)), size), "elias/float32")
        found, _ = decode(words, len(few), size, "elias/float32")
        assert found.numpy().tolist() == few


@every_wire
def test_an_index_outside_of_its_shard_is_refused(name: str) -> None:
    """It would be added to another shard's entry."""
    words = encode(Sparse(tf.constant([1, 5]), tf.ones(2), 6), name)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\b2\b.*\[0, 5\).*[Bb]uffer 0\b"):
        decode(words, 2, 5, name)
