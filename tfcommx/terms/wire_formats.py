"""Sizes of the sparse wire formats, in words; without TensorFlow.

`tfcommx.wire` describes the formats; ops/kernels/wire.h has the layout of the words.
"""

from __future__ import annotations

BLOCK = 65536  # Entries that a uint16 offset can tell apart

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def value_dtype(wire: str) -> str:
    """Name the dtype in which a sparse wire format writes values.

    >>> value_dtype("block16/float16"), value_dtype("pair32")
    ('float16', 'float32')
    """
    return wire.partition("/")[2] or "float32"


def wire_words(k: int, size: int, wire: str) -> tuple[int, int, int]:
    """Count the int32 words of a buffer's three parts: counts, indices or offsets, values.

    >>> wire_words(3, 200_000, "block16/float16"), wire_words(3, 200_000, "pair32")
    ((4, 2, 2), (0, 3, 3))

    Args:
        k: entries in the buffer, >= 0.
        size: length of the vector that the entries were selected from, >= 0.
        wire: one of `terms.SPARSE_WIRES`.
    """
    values = -(-k * _BYTES[value_dtype(wire)] // 4)
    if wire.startswith("block16"):
        return -(-size // BLOCK), (k + 1) // 2, values
    return 0, k, values
