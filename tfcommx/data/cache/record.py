"""A record: one decoded sample as bytes, as a slab holds it and as nodes send it to each other.

    64 bytes of header: sample, label, bytes, height, width, channels, CRC, zeros | pixels | zeros

Records begin at multiples of 64 bytes. ops/kernels/augment.h reads and writes the same layout.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

# Bytes of the header, and what all records are padded to a multiple of.
RECORD = 64
# Sample, label, bytes of the pixels, height, width, channels, CRC of all that and of the pixels.
HEAD = struct.Struct("<qqqiiiI")


def record_bytes(pixel_bytes: int) -> int:
    """Return the bytes that a sample with `pixel_bytes` bytes of pixels takes in a slab."""
    return RECORD + -(-pixel_bytes // RECORD) * RECORD


def record_head(sample: int, label: int, pixels: np.ndarray) -> bytes:
    """Return the 64 bytes that stand before a sample's pixels (uint8 [h, w, c], contiguous)."""
    head = struct.pack("<qqqiii", sample, label, pixels.nbytes, *pixels.shape)
    return head + struct.pack("<I24x", zlib.crc32(pixels, zlib.crc32(head)))


def pack(sample: int, label: int, pixels: np.ndarray) -> bytes:
    """Return the record of a sample (uint8 [h, w, c]), padded to a multiple of 64 bytes.

    >>> record = pack(7, 1, np.zeros((4, 4, 3), np.uint8))
    >>> len(record)
    128
    >>> sample_of(np.frombuffer(record, np.uint8), 0)
    7
    """
    pixels = np.ascontiguousarray(pixels)
    return b"".join(
        (record_head(sample, label, pixels), pixels.data, bytes(-pixels.nbytes % RECORD))
    )


def unpack(records: np.ndarray, at: int) -> tuple[np.ndarray, int]:
    """Return (pixels uint8 [h, w, c], label) of the record at byte `at` of uint8 [m]."""
    label, size = records[at + 8 : at + 24].view(np.int64)
    shape = records[at + 24 : at + 36].view(np.int32)
    return records[at + RECORD : at + RECORD + size].reshape(shape), int(label)


def sample_of(records: np.ndarray, at: int) -> int:
    """Return the sample whose record is at byte `at` of uint8 [m]."""
    return int(records[at : at + 8].view(np.int64)[0])


def is_record(records: np.ndarray, at: int) -> bool:
    """Tell whether a record is at byte `at` of uint8 [m]; zeros are none."""
    return at + RECORD <= len(records) and bool(records[at + 16 : at + 24].view(np.int64)[0])
