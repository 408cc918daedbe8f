"""CRC32C, the checksum of TFRecord files."""

import ctypes
import functools
from typing import Any

from tfcommx.kernels import loader


def crc32c(data: bytes) -> int:
    """Compute the CRC32C of bytes, which TFRecord files store masked.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'

    **Ranks:** local.
    **Cost:** one pass, from any thread, without blocking others; without the library about 70 ns
    per byte.
    """
    native = _native()
    return crc32c_definition(data) if native is None else native(data, len(data))


@functools.cache
def _native() -> Any | None:
    function = loader.plain_function("tfcommx_crc32c")
    if function is not None:
        function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint32
    return function


def crc32c_definition(data: bytes) -> int:
    """Compute the CRC32C of bytes in plain Python, byte by byte.

    >>> crc32c_definition(b"") == crc32c(b"") == 0
    True
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected
    return byte


_TABLE = tuple(map(_row, range(256)))
