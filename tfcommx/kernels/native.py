"""The only door to the native op library, opened at the first call; without a library the reference
does the work.

`TFCOMMX_NATIVE=0` in the environment keeps the door shut.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.kernels import build_digest, reference
from tfcommx.terms import Sparse

FOLDER = Path(__file__).resolve().parent.parent / "lib"
SOURCES = FOLDER.parent.parent / "ops"  # where the package is used from its source tree
GPU_DEVICES = "CPU and CUDA"  # as setup.py writes it
REBUILD = (
    "Rebuild it: python scripts/bootstrap.py, or python setup.py build_ext --inplace in an "
    "environment that is set up."
)


class NativeLibraryError(RuntimeError):
    """The native op library cannot be used with this TensorFlow, or with this Python code."""


@functools.cache
def library() -> Any | None:
    """Load the op library once.

    Returns the module of its ops; None where there is none or TFCOMMX_NATIVE=0, which is announced
    once.
    **Raises:** NativeLibraryError, before anything is loaded, where it was built for another
    TensorFlow, or from other sources than those beside the package.
    """
    if os.environ.get("TFCOMMX_NATIVE", "1") == "0":
        return None
    path, facts = FOLDER / "libtfcommx.so", FOLDER / "build.json"
    if not path.is_file():
        warnings.warn(
            f"tfcommx has no native library at {path}: plain TensorFlow does its work. {REBUILD}",
            stacklevel=2,
        )
        return None
    found = json.loads(facts.read_text()) if facts.is_file() else {}
    built = found.get("tensorflow", "an unknown TensorFlow")
    if built != tf.__version__:
        raise NativeLibraryError(
            f"The native library must be built for the TensorFlow that loads it, {tf.__version__}. "
            f"Received one built for {built} ({path}). {REBUILD}"
        )
    if (SOURCES.parent / "setup.py").is_file() and found.get("sources") != build_digest.digest(
        SOURCES
    ):
        raise NativeLibraryError(
            f"The native library must be built from the sources beside it, {SOURCES}. "
            f"Received one built from others ({path}). {REBUILD}"
        )
    return tf.load_op_library(str(path))


@functools.cache
def _crc32c() -> Any | None:
    if library() is None:
        return None
    function = ctypes.CDLL(str(FOLDER / "libtfcommx.so")).tfcommx_crc32c
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint32
    return function


def crc32c(data: bytes) -> int:
    """Return the CRC32C of bytes, as TFRecord files have it before they mask it.

    **Ranks:** local. **Cost:** one pass, from any thread, others run meanwhile; without the library
    some 70 ns a byte.
    """
    function = _crc32c()
    return reference.crc32c(data) if function is None else function(data, len(data))


def has_gpu_kernels() -> bool:
    """Return whether the library's ops but `augment` also run on GPUs: where nvcc was there when it
    was built.

    No GPU has run them yet: until scripts/check_cuda has passed on one, they are compiled and
    emulated, not proven.
    """
    return (
        library() is not None
        and json.loads((FOLDER / "build.json").read_text())["devices"] == GPU_DEVICES
    )


@functools.cache
def device() -> str:
    """Return where the residuals belong, so that kernels update them in place: with the gradients
    where those kernels exist.

    **Cost:** the first call on a GPU compares the kernels once, some milliseconds. **Raises:** as
    `compare_with_cpu`.
    """
    if not (has_gpu_kernels() and tf.config.list_logical_devices("GPU")):
        return "/cpu:0"
    compare_with_cpu("/gpu:0")
    return "/gpu:0"


def compare_with_cpu(where: str) -> None:
    """Refuse a device whose kernels do not give, here and now, the very bits that the CPU's give:
    drivers and GPUs differ.

    **Ranks:** local. **Raises:** NativeLibraryError that says what differs, before anything is
    trained with it.
    """
    n, k = 100_003, 1_000
    old, gradient = np.random.default_rng(1).standard_normal([2, n], np.float32)

    def work(device_name: str) -> dict[str, Any]:
        with tf.device(device_name):
            residual = tf.Variable(old)
            chosen = select_with_residual(tf.constant(gradient), residual, k, 5, "mstopk")
            places, values = wire_decode(
                wire_encode(chosen, "block16/float16"), k, n, "block16/float16"
            )
            found = {
                "indices": chosen.indices,
                "values": chosen.values,
                "residual": residual,
                "decoded values": values,
                "merged": merge(places, values, n, k),
            }
            return {name: tensor.numpy() for name, tensor in found.items()}

    with tf.init_scope():
        try:
            theirs, problem = work(where), ""
        except tf.errors.OpError as error:
            theirs, problem = {}, f"they failed: {error.message}"
        for name, right in work("/cpu:0").items():
            if not problem and right.tobytes() != theirs[name].tobytes():
                problem = f"other {name}"
    if problem:
        raise NativeLibraryError(
            f"The kernels on {where} must give what those on the CPU give. Received {problem}. "
            "Check them: "
            "scripts/check_cuda. Do without them: TFCOMMX_CUDA=0 python scripts/bootstrap.py"
        )


def select(gradient: Any, k: int, seed: int, rule: str) -> Sparse:
    """Choose k entries of a gradient by magnitude.

    Args: gradient float32 | float16 | bfloat16 [n], n < 2^31; k in [1, n]; seed int64; rule "exact"
    or "mstopk".
    Returns: Sparse, indices int32 [k] ascending and unique, values float32 [k];
    ops/kernels/select.h has the semantics.
    **Ranks:** local; equal inputs give equal results on every rank, whatever the number of threads.
    **Cost:** one pass over the gradient where what a sample predicts fits a list, else two; no host
    synchronisation.
    **Raises:** InvalidArgumentError where k or a shape is out of range.
    """
    ops = library()
    if ops is None:
        return reference.select(gradient, k, seed, rule)
    indices, values = ops.tfcommx_select(
        gradient=gradient, k=_int64(k), seed=_int64(seed), rule=rule
    )
    return Sparse(indices, values, _size(gradient))


def select_with_residual(
    gradient: Any,
    residual: tf.Variable,
    k: int,
    seed: int,
    rule: str,
    velocity: tf.Variable | None = None,
    momentum: float = 0.0,
) -> Sparse:
    """Choose k entries of gradient + residual by magnitude; the residual keeps what is not chosen.

    With a velocity, momentum is corrected for: velocity = momentum * velocity + gradient takes the
    gradient's place, and what is chosen is zeroed in the velocity too.

    Args: as `select`; residual, velocity: float32 [n] variables, updated in place; momentum in [0,
    1).
    Returns: as `select`.
    **Ranks:** local. **Cost:** one pass that reads the gradient and reads and writes the residual
    (and the velocity), as a bare addition would, where what a sample predicts fits a list; else a
    second one that reads the residual. Extra memory <= 2 % of a float32 gradient's at k <= n / 100,
    n >= 2^23.
    **Raises:** InvalidArgumentError where k, a shape, the momentum or a variable's type is wrong;
    FailedPreconditionError where a variable is not initialised.
    **Source:** Lin et al., Deep Gradient Compression, 2018, section 3.2, for the velocity.
    """
    ops = library()
    if ops is None:
        return reference.select_with_residual(gradient, residual, k, seed, rule, velocity, momentum)
    given = {
        "gradient": gradient,
        "residual": residual.handle,
        "k": _int64(k),
        "seed": _int64(seed),
        "rule": rule,
    }
    if velocity is None:
        indices, values = ops.tfcommx_select_residual(**given)
    else:
        indices, values = ops.tfcommx_select_momentum(
            **given, velocity=velocity.handle, momentum=momentum
        )
    return Sparse(indices, values, _size(gradient))


def merge(indices: Any, values: Any, size: int, k: int = 0) -> tf.Tensor:
    """Add (index, value) pairs into zeros, each entry's values in the order of the list.

    Args: indices int32 [pairs] in [0, size), repeats allowed; values float32 [pairs]; size of the
    result, in [0, 2^31); k: the list is made of runs of k pairs without a repeated index, as ranks
    send them; 0: any list, which CPUs merge.
    Returns: float32 [size].
    **Ranks:** local; equal lists give bit-identical results on every rank. **Cost:** one write of
    the result, the pairs read once by each of at most 16 threads; no sort. On a GPU a launch for
    each run.
    **Raises:** InvalidArgumentError where an index is outside [0, size); a GPU returns NaN in entry
    0 instead.
    """
    ops = library()
    if ops is None:
        with tf.device("/cpu:0"):  # a GPU adds in any order, and ranks would differ
            return reference.merge(indices, values, size)
    with contextlib.nullcontext() if k else tf.device("/cpu:0"):
        return ops.tfcommx_merge(indices=indices, values=values, size=_int64(size), k=k)


def wire_encode(sparse: Sparse, wire: str) -> tf.Tensor:
    """Write k entries as one buffer.

    Args: indices int32 [k] in [0, size), ascending for the block formats; values float32 [k],
    rounded to nearest even where the format's are narrower; size an int; wire one of
    terms.SPARSE_WIRES.
    Returns: int32 [words]; ops/kernels/wire.h has the layout.
    **Ranks:** local. **Cost:** one pass. **Raises:** InvalidArgumentError where an index is out of
    range or order.
    """
    ops = library()
    if ops is None:
        return reference.wire_encode(sparse, wire)
    return ops.tfcommx_wire_encode(
        indices=sparse.indices, values=sparse.values, size=sparse.size, format=wire
    )


def wire_decode(
    words: Any, k: int, size: int, wire: str, shards: int = 1
) -> tuple[tf.Tensor, tf.Tensor]:
    """Read the entries of p buffers, one after another.

    Args: words int32 [p * words], what p ranks encoded with the same k, size and wire; shards,
    which divides p: as many of the buffers are of each equal part of a vector of shards * size <
    2^31 entries.
    Returns: indices int32 [p * k] into that vector and values float32 [p * k], in the order of the
    buffers.
    **Ranks:** local. **Cost:** one pass, the buffers side by side. **Raises:** InvalidArgumentError
    where the length, a buffer's counts or its indices do not fit k and size; a GPU returns indices
    of -1 instead.
    """
    ops = library()
    if ops is None:
        return reference.wire_decode(words, k, size, wire, shards)
    return tuple(ops.tfcommx_wire_decode(words=words, k=k, size=size, shards=shards, format=wire))


def _int64(number: Any) -> tf.Tensor:
    with tf.device("/cpu:0"):  # the kernels read it there: on a GPU the host would wait for it
        return tf.cast(number, tf.int64)


def _size(gradient: Any) -> Any:
    static = gradient.shape[0]
    return tf.size(gradient) if static is None else static
