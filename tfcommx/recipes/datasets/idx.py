"""The IDX format: arrays of unsigned bytes behind a short header, gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from tfcommx.recipes.base import DataError

# The command that fetches the files of the only data set in this format
FETCH = "python -m tfcommx.recipes.datasets fashion_mnist"


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read one gzipped IDX file of unsigned bytes.

    The file holds 2 zero bytes, the type 8, the number of dimensions, the sizes (big-endian) and
    the entries.

    Args:
        path: the file.
        shape: sizes that the file must have.

    Returns:
        uint8 array of `shape`.

    **Raises:** DataError that names the file, what was required and what came.
    """
    start = 4 + 4 * len(shape)
    try:
        with gzip.open(path) as file:
            # One byte more tells that there are more: some bytes can decompress to gigabytes.
            content = file.read(start + math.prod(shape) + 1)
    except FileNotFoundError:
        raise DataError(f"{path} is missing. Run `{FETCH}` to fetch it.") from None
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(damaged(path, "a whole gzip file", str(error))) from error
    magic = bytes([0, 0, 8, len(shape)])
    if content[:4] != magic:
        raise DataError(
            damaged(
                path, f"the first bytes {magic.hex(' ')}", content[:4].hex(" ") or "an empty file"
            )
        )
    if len(content) < start:
        raise DataError(damaged(path, f"a header of {start} bytes", f"{len(content)} bytes"))
    sizes = struct.unpack(f">{len(shape)}I", content[4:start])
    if sizes != shape:
        raise DataError(damaged(path, f"sizes {shape}", f"{sizes}"))
    received = len(content) - start
    if received != math.prod(shape):
        more = "more" if received > math.prod(shape) else f"{received}"
        raise DataError(damaged(path, f"{math.prod(shape)} bytes of entries", more))
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def damaged(path: Path, required: str, received: str) -> str:
    """Return the error message about a damaged file."""
    return (
        f"{path} is damaged: {required} required, received {received}. Delete it and run `{FETCH}`."
    )
