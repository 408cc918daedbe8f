"""The device that residuals live on, and a check that its kernels give the CPU's bits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.kernels import keep, loader, merge, norms, select, wire, wire_codes
from tfcommx.kernels.loader import NativeLibraryError


@functools.cache
def residual_device() -> str:
    """Return the device of the residuals: that of the gradients, if the kernels run there.

    **Cost:** the first call on a GPU compares the kernels once, some milliseconds.
    **Raises:** as `compare_with_cpu`.
    """
    if not (loader.has_gpu_kernels() and tf.config.list_logical_devices("GPU")):
        return "/cpu:0"
    compare_with_cpu("/gpu:0")
    return "/gpu:0"


def compare_with_cpu(device: str) -> None:
    """Refuse a device whose kernels do not give the same bits as the CPU's on this machine.

    Drivers and GPUs differ.

    Args:
        device: as TensorFlow names it, "/gpu:0".

    **Ranks:** local.
    **Raises:** NativeLibraryError that says what differs, before anything is trained with it.
    """
    with tf.init_scope():
        try:
            results, problem = _results_on(device), ""
        except tf.errors.OpError as error:
            results, problem = {}, f"they failed: {error.message}"
        for name, expected in _results_on("/cpu:0").items():
            if not problem and expected.tobytes() != results[name].tobytes():
                problem = f"other {name}"
    if problem:
        raise NativeLibraryError(
            f"The kernels on {device} must give what those on the CPU give. Received {problem}. "
            "Check them: scripts/check_cuda. Do without them: "
            "TFCOMMX_CUDA=0 python scripts/setup"
        )


def _results_on(device: str) -> dict[str, Any]:
    """Select, round, encode, decode, merge and take norms once on a device."""
    n, k, wire_format, short = 100_003, 1_000, "block16/float16", "elias/int8"
    old, gradient = np.random.default_rng(1).standard_normal([2, n], np.float32)
    with tf.device(device):
        residual = tf.Variable(old)
        chosen = select.select_with_residual(tf.constant(gradient), residual, k, 5, "mstopk")
        indices, values = wire.decode(wire.encode(chosen, wire_format), k, n, wire_format)
        words = wire.encode(chosen, short)
        rounded, errors = wire_codes.round_values(chosen.values, "int8")
        keep.keep(residual, chosen, errors)
        found = {
            "encoded words": words,
            "short entries": wire.decode(words, k, n, short)[1],
            "rounded values": rounded,
            "indices": chosen.indices,
            "values": chosen.values,
            "residual": residual,
            "decoded values": values,
            "merged": merge.merge(indices, values, n, k),
            "squared norms": norms.squared_norms([residual.read_value(), values]),
        }
        return {name: tensor.numpy() for name, tensor in found.items()}
