"""Bytes and dtypes of what travels: pure arithmetic, so that prices need no TensorFlow."""

from __future__ import annotations

from tfcommx.terms import PLAIN, Bucket
from tfcommx.terms.wire_formats import wire_words
from tfcommx.wire.base import of_others

_ENTRY_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def size_bytes(k: int, size: int, wire: str) -> int:
    """Count the bytes of k selected entries of a vector.

    >>> size_bytes(1000, 200_000, "pair32"), size_bytes(1000, 200_000, "block16/float16")
    (8000, 4016)

    Args:
        k: entries, >= 0.
        size: length of the vector, >= 0.
        wire: one of terms.SPARSE_WIRES, or "module:MEMBER".
    """
    other = of_others(wire)
    return 4 * (other.words(k, size) if other else sum(wire_words(k, size, wire)))


def dense_dtype(bucket: Bucket) -> str:
    """Name the dtype in which a dense bucket's entries travel.

    >>> dense_dtype(Bucket("b", ("w",), (4,), "float32", "asa", wire="float16"))
    'float16'
    """
    return bucket.dtype if bucket.wire == PLAIN else bucket.wire


def sum_dtype(dtype: str) -> str:
    """Name the dtype in which entries that travel as `dtype` are added.

    >>> sum_dtype("float16"), sum_dtype("float64")
    ('float32', 'float64')
    """
    return "float64" if dtype == "float64" else "float32"


def dense_bytes(bucket: Bucket) -> int:
    """Count the bytes of a dense bucket's vector as it travels."""
    return bucket.padded * entry_bytes(dense_dtype(bucket))


def sum_scale(dtype: str, ranks: int) -> float:
    """Return the power of two by which a sum of `ranks` numbers is written, so that it fits.

    If each number is one that float16 can hold, the sum is, too; other dtypes reach far enough.

    >>> sum_scale("float16", 4), sum_scale("float16", 5), sum_scale("bfloat16", 5)
    (0.25, 0.125, 1.0)
    """
    return 2.0 ** -(ranks - 1).bit_length() if dtype == "float16" else 1.0


def entry_bytes(dtype: str) -> int:
    """Return the bytes of one entry: of float16, bfloat16, float32 or float64."""
    return _ENTRY_BYTES[dtype]
