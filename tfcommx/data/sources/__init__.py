"""Where samples come from: one source a file.

To add one: write a class with the members of `base.Source` in a file of its own, and name it here.
`find_source` makes a source of a path or a name.
"""

from __future__ import annotations

import importlib
from typing import Any

# Where each public name lives. Loaded on first use, because reading TFRecords needs TensorFlow.
_PUBLIC = {
    "Arrays": "arrays",
    "Folder": "folder",
    "ImageFeatures": "tfrecord",
    "SampleError": "base",
    "Source": "base",
    "TFRecords": "tfrecord",
    "find_source": "find",
    "imagenet": "tfrecord",
    "tfds": "tfrecord",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
