"""Bytes and dtypes of wire formats.

They are pure arithmetic, because prices must not load TensorFlow. `WireFormat` is the contract of a
format in another package, `Scheme(wire="module:MEMBER")`.
"""

import abc
from typing import Any

from tfcommx.core import DENSE_CODES, ENTRY_BYTES, PLAIN, Bucket, Sparse, is_member, load_member
from tfcommx.core.wire_formats import dense_code_words, wire_words

# A tf.Tensor; Any, because plans and prices do not load TensorFlow
Tensor = Any


class WireFormat(abc.ABC):
    """Writes k selected entries of a vector as int32 words, and reads them.

    It has no access to residuals, routes or ranks: its caller keeps the error of `rounded` in the
    residual.
    """

    @abc.abstractmethod
    def words(self, k: int, size: int) -> int:
        """Count the int32 words of a buffer.

        Args:
            k: entries, >= 0.
            size: length of the vector that they were selected from, >= 0. Prices may ask for less
                than k.

        Returns:
            A number that depends on k and size alone, because the engine's cache must stay valid.
            Values that need more bits must be rounded.
        """

    def rounded(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Round values to numbers that the format can write.

        Args:
            values: float32 [k].

        Returns:
            The rounded values, float32 [k], and the rounding error, float32 [k]: exactly the
            difference, and 0 where a value is not finite, which must stay so. None for the error if
            the format writes float32.
        """
        return values, None

    @abc.abstractmethod
    def encode(self, sparse: Sparse) -> Tensor:
        """Write k entries.

        Args:
            sparse: indices int32 [k] in [0, size), ascending; values float32 [k], as `rounded`
                returned them, which must be written exactly; size, an int.

        Returns:
            int32 [words(k, size)], its length known while tracing.

        **Ranks:** local.
        """

    @abc.abstractmethod
    def decode(self, words: Tensor, k: int, size: int) -> tuple[Tensor, Tensor]:
        """Read the entries of several buffers.

        Args:
            words: int32 [p, words(k, size)], the buffers of p ranks.
            k: entries in each buffer.
            size: length of the vector.

        Returns:
            indices int32 [p, k], ascending in each buffer, and values float32 [p, k].

        **Ranks:** local; the same words must give the same bits on every rank.
        """


def of_others(wire: str) -> WireFormat | None:
    """Return the format that "module:MEMBER" names; None for a name without a colon.

    **Raises:** ConfigurationError if the member does not exist, or is not a `WireFormat`.
    """
    if not is_member(wire):
        return None
    custom: WireFormat = load_member("wire format", wire, WireFormat)
    return custom


def size_bytes(k: int, size: int, wire: str) -> int:
    """Count the bytes of k selected entries of a vector.

    >>> size_bytes(1000, 200_000, "pair32"), size_bytes(1000, 200_000, "block16/float16")
    (8000, 4016)

    Args:
        k: entries, >= 0.
        size: length of the vector, >= 0.
        wire: one of core.SPARSE_WIRES, or "module:MEMBER".
    """
    custom = of_others(wire)
    return 4 * (custom.words(k, size) if custom else sum(wire_words(k, size, wire)))


def dense_dtype(bucket: Bucket) -> str:
    """Name the dtype, or the width of codes, in which a dense bucket's entries travel.

    >>> dense_dtype(Bucket("b", ("w",), (4,), "float32", "asa", wire="float16"))
    'float16'
    """
    return bucket.dtype if bucket.wire == PLAIN else bucket.wire


def sum_dtype(dtype: str) -> str:
    """Name the dtype in which entries that travel as `dtype` are added.

    >>> sum_dtype("float16"), sum_dtype("float64")
    ('float32', 'float64')
    """
    # At least float32, because each addition in 16 bits would round
    return "float64" if dtype == "float64" else "float32"


def dense_bytes(bucket: Bucket, shards: int = 1) -> int:
    """Count the bytes of a dense bucket's vector on the wire.

    >>> dense_bytes(Bucket("b", ("w",), (2000,), "float32", "asa", wire="int1"), shards=2)
    264

    Args:
        bucket: on a dense route.
        shards: equal parts, each written separately, with its own blocks of codes.
    """
    dtype = dense_dtype(bucket)
    if dtype in DENSE_CODES:
        return 4 * shards * sum(dense_code_words(bucket.padded // shards, dtype))
    return bucket.padded * ENTRY_BYTES[dtype]


def sum_scale(dtype: str, ranks: int) -> float:
    """Return the power of two by which a sum of `ranks` numbers is written, so that it fits.

    If float16 can hold each number, it can also hold the scaled sum. Other dtypes need no scale,
    because their range is large enough.

    >>> sum_scale("float16", 4), sum_scale("float16", 5), sum_scale("bfloat16", 5)
    (0.25, 0.125, 1.0)
    """
    return 2.0 ** -(ranks - 1).bit_length() if dtype == "float16" else 1.0
