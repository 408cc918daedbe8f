"""Sizes of the sparse wire formats, in words; without TensorFlow.

`tfcommx.wire` describes the formats; ops/kernels/wire.h has the layout of the words.
"""

from __future__ import annotations

BLOCK = 65536  # Entries that a uint16 offset can tell apart

# Values that share a step, where values are written as codes
CODE_BLOCK = 32

# Bits of a code
CODE_BITS = {"int8": 8, "int4": 4}

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def value_dtype(wire: str) -> str:
    """Name the dtype in which a sparse wire format writes values; int8 and int4 are codes.

    >>> value_dtype("block16/float16"), value_dtype("elias/int4"), value_dtype("pair32")
    ('float16', 'int4', 'float32')
    """
    return wire.partition("/")[2] or "float32"


def low_bits(k: int, size: int) -> int:
    """Return floor(log2(size / k)): of an index, the bits that `elias` writes as they are.

    >>> low_bits(1000, 100_000), low_bits(60, 100), low_bits(0, 100)
    (6, 0, 0)

    Args:
        k: entries, >= 0. More than `size` only in prices, which ask for an entry of no vector.
        size: length of the vector, >= 0.
    """
    return (size // k).bit_length() - 1 if 0 < k <= size else 0


def bitmap_bits(k: int, size: int) -> int:
    """Count the bits of `elias` that hold the rest of k indices; ops/kernels/wire_elias.h.

    >>> bitmap_bits(1000, 100_000)
    2562
    """
    return k + (max(0, size - 1) >> low_bits(k, size)) if k else 0


def code_words(k: int, dtype: str) -> tuple[int, int]:
    """Count the int32 words of k values written as codes: steps of blocks, codes.

    >>> code_words(1000, "int4")
    (16, 125)

    Args:
        k: values, >= 0.
        dtype: one of CODE_BITS.
    """
    blocks = -(-k // CODE_BLOCK)
    return (blocks + 1) // 2, -(-k * CODE_BITS[dtype] // 32)


def wire_words(k: int, size: int, wire: str) -> tuple[int, int, int]:
    """Count the int32 words of a buffer's three parts.

    They are counts or a bitmap; indices, offsets or low bits; values.

    >>> wire_words(3, 200_000, "block16/float16"), wire_words(3, 200_000, "pair32")
    ((4, 2, 2), (0, 3, 3))
    >>> wire_words(1000, 100_000, "elias/int8")
    (81, 188, 266)

    Args:
        k: entries in the buffer, >= 0.
        size: length of the vector that the entries were selected from, >= 0.
        wire: one of `core.SPARSE_WIRES`.
    """
    dtype = value_dtype(wire)
    coded = dtype in CODE_BITS
    values = sum(code_words(k, dtype)) if coded else -(-k * _BYTES[dtype] // 4)
    if wire.startswith("block16"):
        return -(-size // BLOCK), (k + 1) // 2, values
    if wire.startswith("elias"):
        return -(-bitmap_bits(k, size) // 32), -(-k * low_bits(k, size) // 32), values
    return 0, k, values
