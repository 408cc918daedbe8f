"""The only door to the native op library."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType


@functools.cache
def library() -> ModuleType | None:
    """Return the module of native ops, or None where none was built."""
    import tensorflow as tf

    path = Path(__file__).parent / "lib" / "libtfcommx.so"
    return tf.load_op_library(str(path)) if path.exists() else None
