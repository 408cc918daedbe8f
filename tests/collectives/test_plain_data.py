"""Messages between ranks arrive unchanged, and bytes of a stranger make no object of a class."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfcommx.collectives.plain_data import decode, encode
from tfcommx.core import Topology

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)
PLAIN = st.recursive(
    SCALARS | st.binary(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_what_is_told_arrives_equal_and_of_the_same_types(item: Any) -> None:
    assert repr(decode(encode(item))) == repr(item)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.float64([np.nan, -np.inf, -0.0]),
        np.array(3, np.int64),
        np.zeros((0, 4), np.uint8),
        np.array([True, False]),
        np.array([1, 2], ml_dtypes.bfloat16),
    ],
    ids=["transposed", "special", "scalar", "empty", "bool", "bfloat16"],
)
def test_arrays_arrive_bit_for_bit_and_can_be_written_to(array: np.ndarray) -> None:
    before, received, behind = decode(encode((np.ones(2), {"a": array}, [array])))
    for copy in (received["a"], behind[0]):
        assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
        assert copy.tobytes() == array.tobytes()
        copy[...] = 0
    assert before.tolist() == [1, 1]


def test_arrays_of_another_byte_order_arrive_with_their_values() -> None:
    """Big-endian numbers, as some files have them, arrived as others."""
    received = decode(encode(np.array([1.5, -2], ">f4")))
    assert received.tolist() == [1.5, -2] and received.dtype == np.float32


def test_numbers_of_numpy_become_numbers() -> None:
    received = decode(encode([np.float32(0.5), np.int32(3), np.bool_(True)]))
    assert received == [0.5, 3, True] and [type(one) for one in received] == [float, int, bool]


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (Topology(1, 2), "Topology"),
        (Path("a"), "PosixPath"),
        ({1, 2}, "set"),
        (np.array(["a", None]), "ndarray"),
        (np.ma.masked_less(np.arange(3.0), 1), "MaskedArray"),
        ([lambda: 0], "function"),
        (float, "type"),
    ],
)
def test_objects_of_classes_are_refused_where_they_are_given(item: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{named}: "):
        encode(item)


def text(json: bytes, arrays: bytes = b"") -> bytes:
    return len(json).to_bytes(8, "little") + json + arrays


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        pickle.dumps([1]),
        text(b"[1"),
        text(b"\xff"),
        text(b"[" * 100_000),
        text(b'{"tuple": 1}'),
        text(b'{"tuple": [], "dict": []}'),
        text(b"{}"),
        text(b'{"dict": [[[], 1]]}'),
        text(b'{"object": "os.system"}'),
        text(b'{"bytes": "?"}'),
        text(b'{"array": ["object", [1]]}', bytes(8)),
        text(b'{"array": ["float32", [1000000000000]]}', bytes(8)),
        text(b'{"array": ["float32", [-1, -2]]}', bytes(8)),
        text(b'{"array": ["float32", ["1"]]}', bytes(4)),
        text(b'{"array": ["float32", [1]]}', bytes(5)),
        (2**63).to_bytes(8, "little"),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=rf"\b{len(data)} bytes"):
        decode(data)
