"""The table of wire formats: their names, how each writes indices and values, and its words.

A Sparse becomes one flat buffer of exact size, which one collective exchanges:

    pair32          k int32 indices, k float32 values                             8 B an entry
    pair16/DTYPE    k int32 indices, k 16-bit values                              6 B
    block16/DTYPE   one int32 count per block of 65,536 entries of the vector,
                    k uint16 offsets into their blocks, k values                  4 B, or 6 B
                                                                                  with float32
    elias/DTYPE     indices by Elias-Fano coding, at most 2 + log2(size / k)      at 1 %: 2.1 B, or
                    bits each; k values: float32, float16, or codes of            1.6 B with int4
                    8 or 4 bits (int8, int4) in blocks of 32 that share a
                    16-bit step

Buffers are int32 words, because every engine supports them (NCCL has no 16-bit integers); 16-bit
parts of odd length end in two zero bytes. The size depends only on k and the vector's length,
because Horovod's cache of all-gathers must stay valid. ops/kernels/wire.h has the layout of the
words.

A dense route may write its entries in fewer bits than it adds them in: as float32, float16,
bfloat16, or as codes of a few bits, in blocks of 128 (`int1`: 512) that share a 16-bit step:

    int8, int4      multiples of the step up to 127 and 7        1.016 B and .516 B an entry
    int2            -3, -1, 1 or 3 steps                         .266 B
    int1            the sign: -1 or 1 step                       .129 B

ops/kernels/low_bits.h explains the choice of the steps.

To add a format:
    1. Add a row to SPARSE_FORMATS. A new way to write indices is a row of INDEX_WORDS, too, and its
       definition one of `kernels.wire.INDEX_DEFINITIONS`; codes of another width are a row of
       CODE_BITS, or of DENSE_CODES for whole vectors.
    2. Add the name to the native ops: ops/tf/wire.cc and ops/tf/low_bits.cc list the same names.
    3. Document its cost in docs/explanation/routes.md.
    Schemes, prices, recipes, laws, the tests of wire formats and the comparison of GPU and CPU
    iterate over these tables. A format of another package derives from `wire.formats.WireFormat`.
"""

from collections.abc import Callable
from typing import NamedTuple

# Wire format of a dense route that sends the gradient's own dtype.
PLAIN = "plain"

# Bytes of an entry.
ENTRY_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# Dtypes of dense sums; others travel as float32.
DENSE_DTYPES = ("float16", "float32", "float64")

# Dtypes in which entries travel.
VALUE_DTYPES = ("float32", "float16", "bfloat16")

# Bits of a code of a selected entry.
CODE_BITS = {"int8": 8, "int4": 4}

# Number of selected entries that share a step, if they are written as codes. The step, of 16 bits,
# costs half a bit an entry
CODE_BLOCK = 32

# Bits of a code of an entry of a whole vector.
DENSE_CODES = {**CODE_BITS, "int2": 2, "int1": 1}

# Number of entries of a whole vector that share a step of 16 bits; ops/kernels/low_bits.h has the
# reasons
DENSE_CODE_BLOCKS = {"int8": 128, "int4": 128, "int2": 128, "int1": 512}

# Formats of dense routes.
DENSE_WIRES = (*VALUE_DTYPES, *DENSE_CODES)

# Formats narrower than float32, whose rounding errors stay in a residual.
NARROW = DENSE_WIRES[1:]

# Codes with so few levels that gradients diverge in front of a momentum, which amplifies noise.
NOISY = ("int2", "int1")

# Number of entries that a uint16 offset can distinguish.
BLOCK = 65536


class SparseFormat(NamedTuple):
    """The representation of selected entries."""

    # One of INDEX_WORDS
    indices: str
    # A dtype of VALUE_DTYPES or codes of CODE_BITS
    values: str


SPARSE_FORMATS = {
    "pair32": SparseFormat("pair", "float32"),
    "pair16/float16": SparseFormat("pair", "float16"),
    "pair16/bfloat16": SparseFormat("pair", "bfloat16"),
    "block16/float32": SparseFormat("block16", "float32"),
    "block16/float16": SparseFormat("block16", "float16"),
    "block16/bfloat16": SparseFormat("block16", "bfloat16"),
    "elias/float32": SparseFormat("elias", "float32"),
    "elias/float16": SparseFormat("elias", "float16"),
    "elias/int8": SparseFormat("elias", "int8"),
    "elias/int4": SparseFormat("elias", "int4"),
}
SPARSE_WIRES = tuple(SPARSE_FORMATS)

WIRES = (PLAIN, *DENSE_WIRES, *SPARSE_WIRES)


def low_bits(k: int, size: int) -> int:
    """Return floor(log2(size / k)), the number of low bits of an index that `elias` writes plainly.

    >>> low_bits(1000, 100_000), low_bits(60, 100), low_bits(0, 100)
    (6, 0, 0)
    """
    # k exceeds `size` only in prices, which may ask for an entry of an empty vector
    return (size // k).bit_length() - 1 if 0 < k <= size else 0


def bitmap_bits(k: int, size: int) -> int:
    """Count the bits of `elias` for the high bits of k indices; see ops/kernels/wire_elias.h.

    >>> bitmap_bits(1000, 100_000)
    2562
    """
    return k + (max(0, size - 1) >> low_bits(k, size)) if k else 0


def code_words(k: int, dtype: str) -> tuple[int, int]:
    """Count the int32 words of k values as codes: steps of blocks, codes.

    >>> code_words(1000, "int4")
    (16, 125)
    """
    blocks = -(-k // CODE_BLOCK)
    # Two steps of 16 bits share a word
    return (blocks + 1) // 2, -(-k * CODE_BITS[dtype] // 32)


def dense_code_words(entries: int, wire: str) -> tuple[int, int]:
    """Count the int32 words of a shard as codes: steps of blocks, codes of whole blocks.

    >>> dense_code_words(1000, "int1")
    (1, 32)
    """
    block = DENSE_CODE_BLOCKS[wire]
    blocks = -(-entries // block)
    return (blocks + 1) // 2, blocks * block * DENSE_CODES[wire] // 32


# (k, size) -> int32 words of counts or a bitmap, and of indices, offsets or low bits
INDEX_WORDS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "pair": lambda k, size: (0, k),
    "block16": lambda k, size: (-(-size // BLOCK), (k + 1) // 2),
    "elias": lambda k, size: (-(-bitmap_bits(k, size) // 32), -(-k * low_bits(k, size) // 32)),
}


def wire_words(k: int, size: int, wire: str) -> tuple[int, int, int]:
    """Count the int32 words of a buffer's three parts.

    They are counts or a bitmap; indices, offsets or low bits; values.

    >>> wire_words(3, 200_000, "block16/float16"), wire_words(3, 200_000, "pair32")
    ((4, 2, 2), (0, 3, 3))
    >>> wire_words(1000, 100_000, "elias/int8")
    (81, 188, 266)
    """
    indices, values = SPARSE_FORMATS[wire]
    coded = values in CODE_BITS
    words = sum(code_words(k, values)) if coded else -(-k * ENTRY_BYTES[values] // 4)
    return *INDEX_WORDS[indices](k, size), words
