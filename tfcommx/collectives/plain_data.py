"""Plain data to bytes and back, for data that ranks exchange.

It does not use pickle, because any program that reaches the port of a rank may send data, and
loading a pickle runs code of its sender. Here bytes can only become values of the types below.

    8 bytes                  length of the text, little-endian
    text                     JSON; each container but a list is an object with one key, its type
    bytes of the arrays      one after another, in the order in which the text mentions them

    [1, ("a", b"b")]    ->   [1, {"tuple": ["a", {"bytes": "Yg=="}]}]

It needs neither TensorFlow nor Horovod.
"""

import base64
import json
import math
import re
import struct
from typing import Any

import numpy as np

# Names of the dtypes of arrays; those of TensorFlow, such as bfloat16, require that it is loaded
_DTYPES = re.compile(r"bool|u?int\d+|b?float\d+|complex\d+|float8_\w+")
_LENGTH = struct.Struct("<Q")


def encode(item: object) -> bytes:
    """Return an item as bytes, which `decode` turns into an equal item.

    >>> decode(encode({("a", 1): [None, True, 0.1, (b"b",)]}))
    {('a', 1): [None, True, 0.1, (b'b',)]}

    Args:
        item: None, bool, int, float, str, bytes, an array of numbers, or a list, tuple or dict of
            these. NumPy's numbers become Python's.

    **Cost:** a copy of each array. **Raises:** TypeError for any other type, including named
    tuples: pass their values, and make them again from the received ones.
    """
    arrays: list[bytes] = []
    text = json.dumps(_to_json(item, arrays)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def decode(data: bytes) -> Any:
    """Return the item that `encode` turned into these bytes.

    **Raises:** ValueError for other bytes.
    """
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        arrays = _Arrays(data, end)
        item = _from_json(json.loads(data[_LENGTH.size : end]), arrays)
        if arrays.position != len(data):
            raise ValueError("more bytes than the arrays have")
    except (LookupError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise ValueError(
            "Plain data of another rank is required, as tfcommx.collectives.plain_data writes it. "
            f"Received {data[:40]!r}, {len(data)} bytes: {error}. Do all ranks have the same "
            "version, and can no other program reach their ports?"
        ) from error
    return item


def _to_json(item: Any, arrays: list[bytes]) -> Any:
    if isinstance(item, np.generic):
        item = item.item()
    # The exact type, because a subclass, such as a named tuple, would arrive as its base class
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if kind is list:
        return [_to_json(value, arrays) for value in item]
    if kind is tuple:
        return {"tuple": [_to_json(value, arrays) for value in item]}
    if kind is dict:
        # Pairs, because the keys of a JSON object can only be text
        pairs = item.items()
        return {"dict": [[_to_json(part, arrays) for part in pair] for pair in pairs]}
    if kind is bytes:
        return {"bytes": base64.b64encode(item).decode()}
    # Not a masked array: its bytes are those of its fill value, and the mask would be lost
    is_array = isinstance(item, np.ndarray) and not np.ma.is_masked(item)
    if is_array and _DTYPES.fullmatch(item.dtype.name):
        # In native byte order, because the name does not include the order
        arrays.append(item.astype(item.dtype.newbyteorder("="), copy=False).tobytes())
        return {"array": [item.dtype.name, list(item.shape)]}
    raise TypeError(
        "Ranks tell each other None, numbers, text, bytes, arrays of numbers, and lists, tuples "
        f"and dicts of them. Received {kind.__name__}: {item!r:.80}. Give its values, such as "
        "`filled(0)` of a masked array."
    )


class _Arrays:
    """The bytes after the text, from which one array after another is taken."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data, self.position = data, position

    def take(self, name: str, shape: list[int]) -> np.ndarray:
        """Return the next array. **Raises:** ValueError if there are too few bytes."""
        # True and False are of type int to `isinstance`, and are no sizes
        if not _DTYPES.fullmatch(name) or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"an array of {name!r:.40}, {shape!r:.40}")
        dtype, count = np.dtype(name), math.prod(shape)
        start, self.position = self.position, self.position + count * dtype.itemsize
        if self.position > len(self.data):
            raise ValueError("fewer bytes than the arrays have")
        # A copy; an array on `data` would be read-only
        return np.frombuffer(self.data[start : self.position], dtype).reshape(shape).copy()


def _from_json(value: Any, arrays: _Arrays) -> Any:
    if isinstance(value, list):
        return [_from_json(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    # Fails for an object with another number of keys, which `encode` never writes
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_from_json(part, arrays) for part in content)
    if kind == "dict":
        return {_from_json(key, arrays): _from_json(part, arrays) for key, part in content}
    if kind == "bytes":
        # Without `validate`, Python skips characters that base64 does not have
        return base64.b64decode(content, validate=True)
    if kind == "array":
        return arrays.take(*content)
    raise ValueError(f"a value of type {kind!r:.40}")
