"""The device of the residuals, and a check that its kernels return the same bits as the CPU's."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfcommx.core.wire_formats import CODE_BITS, DENSE_CODES
from tfcommx.kernels import dense, lars, loader, low_bits, select, sparse, wire, wire_codes
from tfcommx.kernels.loader import NativeLibraryError

# Entries of the vectors, and number of chosen entries
ENTRIES, CHOSEN = 100_003, 1_000
# Entries of a vector so long that a warp of the selection takes a second strip of 1024, because a
# GPU runs 8 blocks of 8 warps on each of its processors (ops/kernels/select_cuda.cu). An H100 has
# 132 processors, and no GPU so far has more than 188.
MANY_STRIPS = 192 * 8 * 8 * 1024 + 5_000


@functools.cache
def residual_device() -> str:
    """Return the device of the residuals, that of the gradients if the kernels run on it.

    **Cost:** the first call on a GPU compares the kernels once, as `compare_with_cpu`.
    **Raises:** as `compare_with_cpu`.
    """
    if not (loader.has_gpu_kernels() and tf.config.list_logical_devices("GPU")):
        return "/cpu:0"
    compare_with_cpu("/gpu:0")
    return "/gpu:0"


def compare_with_cpu(device: str) -> None:
    """Refuse a device whose kernels do not return the same bits as the CPU's on this machine.

    Every kernel that changes gradients, residuals or weights is compared once, with each type and
    rule that has separate code on a GPU, because drivers and GPUs differ.

    Args:
        device: TensorFlow's name of the device, such as "/gpu:0".

    **Ranks:** local.
    **Cost:** 0.4 s of processor time if the device is the CPU, most of it for a selection from 12.6
    million entries, which needs four times 50 MB on each device. On an H100 0.5 s.
    **Raises:** NativeLibraryError that names the difference, before any training.
    """
    problem = ""
    # The calls run now, also if the residuals are made while a step is traced
    with tf.init_scope():
        for results_on in (_exchange, _selections, _dense, _low_bits, _updates, _many_strips):
            try:
                results = results_on(device)
            except tf.errors.OpError as error:
                problem = f"they failed: {error.message}"
                break
            expected = results_on("/cpu:0")
            if different := [name for name in expected if _differ(expected[name], results[name])]:
                problem = f"other {different[0]}"
                break
    if problem:
        raise NativeLibraryError(
            f"The kernels on {device} must give what those on the CPU give. Received {problem}. "
            "Check them: scripts/check_cuda. Do without them: "
            "TFCOMMX_CUDA=0 python scripts/setup"
        )


def _differ(expected: np.ndarray, result: np.ndarray) -> bool:
    """Return True if two arrays differ in a bit, including the sign of a zero."""
    if expected.shape != result.shape or expected.dtype != result.dtype:
        return True
    # As integers, because a NaN is not equal to itself
    bits = f"u{expected.dtype.itemsize}"
    return not np.array_equal(expected.reshape(-1).view(bits), result.reshape(-1).view(bits))


def _normal(count: int) -> np.ndarray:
    """Return `count` vectors of normal numbers, float32 [count, ENTRIES], the same on each call."""
    return np.random.default_rng(1).standard_normal([count, ENTRIES], np.float32)


def _arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _exchange(device: str) -> dict[str, np.ndarray]:
    """Select, round, encode, decode, merge and take norms once on a device."""
    n, k, wire_format = ENTRIES, CHOSEN, "block16/float16"
    old, gradient = _normal(2)
    results: dict[str, Any] = {}
    with tf.device(device):
        residual = tf.Variable(old)
        chosen = select.select_with_residual(tf.constant(gradient), residual, k, 5, "mstopk")
        indices, values = wire.decode(wire.encode(chosen, wire_format), k, n, wire_format)
        for codes in CODE_BITS:
            words = wire.encode(chosen, f"elias/{codes}")
            rounded, errors = wire_codes.round_values(chosen.values, codes)
            results |= {
                f"words of {codes}": words,
                f"entries of {codes}": wire.decode(words, k, n, f"elias/{codes}")[1],
                f"rounding to {codes}": rounded,
                f"errors of {codes}": errors,
            }
        sparse.keep(residual, chosen, errors)
        results |= {
            "indices": chosen.indices,
            "values": chosen.values,
            "residual": residual,
            "decoded values": values,
            "merged": sparse.merge(indices, values, n, k),
            "squared norms": lars.squared_norms([residual.read_value(), values]),
        }
        return _arrays(results)


def _selections(device: str) -> dict[str, np.ndarray]:
    """Select by the exact rule, from gradients in 16 bits, and with a velocity."""
    old, moved, gradient = _normal(3)
    results: dict[str, Any] = {}
    with tf.device("/cpu:0"):  # TensorFlow's conversion is not compared
        gradients = [tf.cast(gradient, dtype) for dtype in ("float32", "float16", "bfloat16")]
    with tf.device(device):
        for typed in gradients:
            dtype = typed.dtype.name
            for rule in ("exact", "mstopk"):
                residual, velocity = tf.Variable(old), tf.Variable(moved)
                without = select.select(typed, CHOSEN, 5, rule)
                chosen = select.select_with_residual(
                    typed, residual, CHOSEN, 5, rule, velocity, 0.9
                )
                results |= {
                    f"indices by {rule} of {dtype}": without.indices,
                    f"values by {rule} of {dtype}": without.values,
                    f"indices by {rule} of a velocity and {dtype}": chosen.indices,
                    f"values by {rule} of a velocity and {dtype}": chosen.values,
                    f"residual by {rule} of a velocity and {dtype}": residual,
                    f"velocity by {rule} of {dtype}": velocity,
                }
        return _arrays(results)


def _dense(device: str) -> dict[str, np.ndarray]:
    """Write a vector in 16 bits, with a residual, and add the vectors of several ranks."""
    old, gradient = _normal(2)
    results: dict[str, Any] = {}
    with tf.device(device):
        for dtype in ("float16", "bfloat16"):
            residual = tf.Variable(old)
            # Neither the offset nor the length fits a vector instruction, so that remainders are
            # compared
            entries = tf.constant(gradient[7:-4])
            written = dense.write(entries, residual, dtype, start=5, scale=0.5)
            parts = tf.concat([written, written[::-1], written], axis=0)
            results |= {
                f"vector in {dtype}": tf.bitcast(written, tf.uint16),
                f"residual of {dtype}": residual,
                f"sum of {dtype}": dense.add(parts, dtype, 3, 1 / 3),
            }
        return _arrays(results)


def _low_bits(device: str) -> dict[str, np.ndarray]:
    """Write two shards in codes, with a residual, add one of them to itself, and read both."""
    old, gradient = _normal(2)
    results: dict[str, Any] = {}
    entries = ENTRIES // 2
    with tf.device(device):
        for codes in DENSE_CODES:
            residual, vector = tf.Variable(old[1:]), tf.constant(gradient[1:])
            # The last 50 entries count as padding
            words = low_bits.write(vector, residual, codes, entries, 2 * entries - 50)
            after = residual.read_value()
            shard = words[len(words) // 2 :]
            parts = tf.concat([shard, shard, shard], axis=0)
            total = low_bits.add_and_write(parts, residual, codes, entries, entries, entries - 50)
            results |= {
                f"vector in {codes}": words,
                f"residual of {codes}": after,
                f"sum of {codes}": total,
                f"residual of a sum of {codes}": residual,
                f"numbers of {codes}": low_bits.read(words, codes, entries, 1 / 3),
            }
        return _arrays(results)


def _updates(device: str) -> dict[str, np.ndarray]:
    results: dict[str, Any] = {}
    with tf.device(device):
        for nesterov in (False, True):
            parts = [np.split(vector, [7, 4_096]) for vector in _normal(3)]
            weights, momenta = ([tf.Variable(vector) for vector in part] for part in parts[:2])
            lars.lars_update(
                weights,
                momenta,
                [tf.constant(vector) for vector in parts[2]],
                tf.constant([0.1, 0.3, 0.01]),
                [0.0, 5e-4, 1e-4],
                0.9,
                nesterov,
            )
            for name, variables in (("weights", weights), ("momentum", momenta)):
                results |= {
                    f"{name} by LARS, nesterov={nesterov}, part {number}": variable
                    for number, variable in enumerate(variables)
                }
        return _arrays(results)


def _many_strips(device: str) -> dict[str, np.ndarray]:
    """Select from a vector so long that each warp of a GPU takes several strips."""
    # Repeated numbers; drawing so many would take seconds
    old, gradient = (np.resize(vector, MANY_STRIPS) for vector in _normal(2))
    with tf.device(device):
        residual = tf.Variable(old)
        k = MANY_STRIPS // 100
        chosen = select.select_with_residual(tf.constant(gradient), residual, k, 5, "mstopk")
        return _arrays(
            {
                "indices of many": chosen.indices,
                "values of many": chosen.values,
                "residual of many": residual,
            }
        )
