"""Measures what adding a byte to another takes (gamma), on the device where gradients are added."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

# Bytes of a vector on a GPU: shorter ones take what a launch takes
BYTES_ON_GPU = 2**24
# Additions whose time counts; a launch and the way back to the host would hide a single one's
ADDITIONS = 32


def seconds_per_byte(
    device: str, size: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds per byte of adding one vector to another.

    Args:
        device: "/cpu:0", or a GPU as TensorFlow names it.
        size: bytes of the vectors on the CPU, a multiple of 4, >= 4.
        repeats: >= 1. On the CPU the fastest counts.
        clock: returns seconds from any start.

    **Ranks:** local. **Cost:** `repeats` additions, or on a GPU `repeats` + 1 times 34, and 32 MB
    of its memory meanwhile.
    """
    if device == "/cpu:0":
        return _on_host(size, repeats, clock)
    return on_device(device, BYTES_ON_GPU, repeats, clock)


def on_device(device: str, size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds per byte of TensorFlow's addition on a device.

    They are the difference of a row of additions and a single one, both with an entry of the result
    read on the host: a launch ends before the addition does. Medians count, because a GPU's clock
    and the host's other work change single times either way.

    Args:
        device: as TensorFlow names it.
        size: bytes of the vectors, a multiple of 4, >= 4.
        repeats: >= 1.
        clock: returns seconds from any start.
    """
    with tf.device(device):
        total, other = tf.Variable(tf.zeros([size // 4])), tf.ones([size // 4])

    def row(additions: int) -> Callable[[], tf.Tensor]:
        @tf.function(autograph=False)
        def add() -> tf.Tensor:
            with tf.device(device):
                for _ in range(additions):  # In place, so in turn
                    total.assign_add(other)
                return total.read_value()[:1]

        return add

    def seconds(work: Callable[[], tf.Tensor]) -> float:
        times = []
        for _ in range(repeats + 1):
            start = clock()
            work().numpy()
            times.append(clock() - start)
        return statistics.median(times[1:])  # The first one is traced

    longer = seconds(row(1 + ADDITIONS)) - seconds(row(1))
    return max(longer, 0.0) / (ADDITIONS * size)


def _on_host(size: int, repeats: int, clock: Callable[[], float]) -> float:
    total, other, best = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32), math.inf
    for _ in range(repeats):
        start = clock()
        np.add(total, other, out=total)
        best = min(best, clock() - start)
    return max(best, 0.0) / (4 * len(total))
