"""The native op library, loaded at the first use. The only module that loads it.

`TFCOMMX_NATIVE=0` in the environment keeps it from being loaded: plain TensorFlow does its work.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any

from tfcommx.core import TfcommxError
from tfcommx.kernels import build

FOLDER = Path(__file__).resolve().parent.parent / "lib"
SOURCES = FOLDER.parent.parent / "ops"  # If the package is used from its source tree
GPU_DEVICES = "CPU and CUDA"  # As setup.py writes it
REBUILD = (
    "Rebuild it: python scripts/setup, or python setup.py build_ext --inplace in an "
    "environment that is set up."
)


class NativeLibraryError(TfcommxError, RuntimeError):
    """The native op library cannot be used with this TensorFlow, or with this Python code."""


@functools.cache
def library() -> Any | None:
    """Load the op library once; say once if there is none.

    Returns:
        The module of its ops; None if there is no library or TFCOMMX_NATIVE=0.

    **Raises:** NativeLibraryError, before anything is loaded, if it was built for another
    TensorFlow, or from other sources than those beside the package.
    """
    if os.environ.get("TFCOMMX_NATIVE", "1") == "0":
        return None
    import tensorflow as tf

    path = FOLDER / "libtfcommx.so"
    if not path.is_file():
        warnings.warn(
            f"tfcommx has no native library at {path}: plain TensorFlow does its work. {REBUILD}",
            stacklevel=2,
        )
        return None
    _check_build(path, tf.__version__)
    return tf.load_op_library(str(path))


def _check_build(path: Path, tensorflow_version: str) -> None:
    """Refuse a library of another TensorFlow, or of other sources than those beside it."""
    found = facts()
    built = found.get("tensorflow", "an unknown version")
    if built != tensorflow_version:
        raise NativeLibraryError(
            "The native library must be built for the TensorFlow that loads it, "
            f"{tensorflow_version}. Received one built for {built} ({path}). {another_build()}"
        )
    if in_source_tree() and found.get("sources") != build.digest(SOURCES):
        raise NativeLibraryError(
            f"The native library must be built from the sources beside it, {SOURCES}. "
            f"Received one built from others ({path}). {REBUILD}"
        )


def in_source_tree() -> bool:
    """Tell whether the package is used from its source tree, not installed from a wheel."""
    return (SOURCES.parent / "setup.py").is_file()


def another_build() -> str:
    """Say how to come to a library that fits the TensorFlow which is installed."""
    if in_source_tree():
        return REBUILD
    return (
        f"Install TensorFlow {facts().get('tensorflow', '')}, or a tfcommx that is built for "
        "yours: `pip install --no-build-isolation .` in its source tree. `python3 scripts/setup` "
        "there makes an environment in which all versions fit."
    )


def facts() -> dict[str, Any]:
    """Read what setup.py noted of the build; {} if it is missing or damaged.

    Then the library counts as one of an unknown version, which is refused and built anew.
    """
    try:
        found = json.loads((FOLDER / "build.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def plain_function(name: str) -> Any | None:
    """Return a C function of the library that is no TensorFlow op; None if there is no library."""
    if library() is None:
        return None
    return getattr(ctypes.CDLL(str(FOLDER / "libtfcommx.so")), name)


def gpu_architectures() -> list[int] | None:
    """Return the GPU architectures that the library was built for; None without GPU kernels.

    Returns:
        Numbers such as 70, as build.py describes them. None also if TFCOMMX_NATIVE=0
        keeps the library from being loaded. The library is not loaded for the answer.
    """
    built = facts()
    unused = os.environ.get("TFCOMMX_NATIVE", "1") == "0"
    return None if unused or built.get("devices") != GPU_DEVICES else built.get("architectures", [])


def has_gpu_kernels() -> bool:
    """Tell whether the library's ops, except `augment`'s, also run on GPUs.

    They do if nvcc was there when the library was built.
    """
    return library() is not None and facts().get("devices") == GPU_DEVICES
