"""The native op library, loaded at the first use. Only this module loads it.

With `TFCOMMX_NATIVE=0` in the environment it is not loaded, and plain TensorFlow does its work.
"""

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
SOURCES = FOLDER.parent.parent / "ops"  # Exists if the package is used from its source tree
GPU_DEVICES = "CPU and CUDA"  # Text that setup.py writes
REBUILD = (
    "Rebuild it: python scripts/setup, or python setup.py build_ext --inplace in an "
    "environment that is set up."
)


class NativeLibraryError(TfcommxError, RuntimeError):
    """The native op library cannot be used with this TensorFlow, or with this Python code."""


@functools.cache
def library() -> Any | None:
    """Load the op library once; warn once if it does not exist.

    Returns:
        The module of its ops; None if there is no library or TFCOMMX_NATIVE=0.

    **Raises:** NativeLibraryError, before it is loaded, if it was built for another TensorFlow, or
    from other sources than those next to the package.
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
    """Refuse a library of another TensorFlow, or of other sources than those next to it."""
    record = facts()
    built = record.get("tensorflow", "an unknown version")
    if built != tensorflow_version:
        raise NativeLibraryError(
            "The native library must be built for the TensorFlow that loads it, "
            f"{tensorflow_version}. Received one built for {built} ({path}). {another_build()}"
        )
    # In the source tree alone, because a wheel has no sources to compare with
    if in_source_tree() and record.get("sources") != build.digest(SOURCES):
        raise NativeLibraryError(
            f"The native library must be built from the sources beside it, {SOURCES}. "
            f"Received one built from others ({path}). {REBUILD}"
        )


def in_source_tree() -> bool:
    """Return True if the package is used from its source tree, not installed from a wheel."""
    return (SOURCES.parent / "setup.py").is_file()


def another_build() -> str:
    """Return the instructions for a library that fits the installed TensorFlow."""
    if in_source_tree():
        return REBUILD
    return (
        f"Install TensorFlow {facts().get('tensorflow', '')}, or a tfcommx that is built for "
        "yours: `pip install --no-build-isolation .` in its source tree. `python3 scripts/setup` "
        "there makes an environment in which all versions fit."
    )


def facts() -> dict[str, Any]:
    """Read setup.py's record of the build; {} if it is missing or damaged.

    A library without a record has an unknown version. It is refused, and must be built again.
    """
    try:
        record = json.loads((FOLDER / "build.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def plain_function(name: str) -> Any | None:
    """Return a C function of the library, not a TensorFlow op; None if there is no library."""
    # `library` is called first: it refuses another TensorFlow's build, which `CDLL` would load
    if library() is None:
        return None
    return getattr(ctypes.CDLL(str(FOLDER / "libtfcommx.so")), name)


def gpu_architectures() -> list[int] | None:
    """Return the GPU architectures that the library was built for; None without GPU kernels.

    Returns:
        Numbers such as 70, as build.py describes them. None also if TFCOMMX_NATIVE=0. The library
        is not loaded.
    """
    built = facts()
    unused = os.environ.get("TFCOMMX_NATIVE", "1") == "0"
    return None if unused or built.get("devices") != GPU_DEVICES else built.get("architectures", [])


def has_gpu_kernels() -> bool:
    """Return True if the library's ops, except `augment`'s, also run on GPUs.

    They do if nvcc existed when the library was built.
    """
    return library() is not None and facts().get("devices") == GPU_DEVICES
