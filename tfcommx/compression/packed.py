"""Packed: three entries travel as whole numbers in one float32, and are summed there.

    step of a block = 2 * (sum over the ranks of the block's largest entry) / ranks / levels
    a, b, c         = three entries, one out of each third of the bucket, in whole steps
    float32         = a + 321 b + 321^2 c

A rank's numbers are in [-levels, levels] with levels = 160 // ranks, so sums over the ranks are in
[-160, 160], and any sum of such floats is a whole number below 2^24: exact, in whatever order a
route adds. The residual keeps the rounding error, and the excess over a rank's range: if only one
rank has a gradient, each step sends 2 / ranks of the remainder. A number has 6.3 bits on 4 ranks
and 4.4 on 16, so this suits few ranks, where it sends 0.34 of the bytes.

**Source:** whole numbers that a ring can add are the idea of Mishchenko et al., "IntSGD: Adaptive
Floatless Compression of Stochastic Gradients" (2021); there one scale for all, random rounding and
int8 or int32 on the wire. Here a scale for each block, error feedback, and the engine's float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tfcommx.compression.compression import Add, Compression, CompressionResult, Shape, Tensor
from tfcommx.core import PlanError

# Whole numbers in a float32, the base in which they are its digits, and a sum's largest digit:
# LARGEST * (1 + BASE + BASE**2) < 2**24
DIGITS, LARGEST = 3, 160
BASE = 2 * LARGEST + 1
# Entries that share a step
BLOCK = 128
# A rank's range, relative to the mean of all ranks' largest entries
RANGE = 2.0
# Power of two by which largest entries are divided; their sum is then finite if they are
SCALE = 128.0


@dataclass(frozen=True)
class Packed(Compression):
    """Sends three entries in one float32."""

    # With one level, RANGE times the mean largest entry, nearly all entries would round to 0
    most_ranks: ClassVar[float] = LARGEST // 2

    def sums(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Count the blocks and a number for the ranks, then the packed entries."""
        entries = sum(map(math.prod, shapes))
        blocks = DIGITS * math.ceil(entries / BLOCK / DIGITS)
        counts = (blocks + 1, blocks // DIGITS * BLOCK)
        return counts if 2 * sum(counts) <= entries else ()

    def passes(self) -> float:
        """Return the passes of a step over the gradients' bytes."""
        return 8.0

    def run(self, gradients: Sequence[Tensor], state: Tensor, add: Add) -> CompressionResult:
        """Agree on steps, then send whole numbers of them.

        **Cost:** two sums; 8 passes over the gradients.
        """
        import tensorflow as tf

        shapes = [tuple(gradient.shape) for gradient in gradients]
        sizes = [math.prod(shape) for shape in shapes]
        blocks = self.sums(shapes)[0] - 1
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
        padded = tf.reshape(tf.pad(flat, [[0, blocks * BLOCK - sum(sizes)]]), [blocks, BLOCK])
        largest = tf.reduce_max(tf.abs(padded), axis=1) / SCALE
        agreed = add(tf.concat([largest, [1.0]], 0))
        ranks = agreed[-1]
        levels = tf.floor(LARGEST / ranks)
        steps = agreed[:-1, tf.newaxis] * (SCALE * RANGE / ranks / levels)
        numbers = tf.math.divide_no_nan(padded, steps)
        numbers = tf.clip_by_value(tf.round(numbers), -levels, levels)
        digits = tf.reshape(numbers, [DIGITS, -1])
        totals = steps * tf.reshape(_unpacked(add(_packed(digits))), [blocks, BLOCK])

        def by_variable(entries: Tensor) -> list[Tensor]:
            parts = tf.split(tf.reshape(entries, [-1])[: sum(sizes)], sizes)
            return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

        return CompressionResult(by_variable(totals), by_variable(steps * numbers), state)


def read(argument: str) -> Packed:
    """Return the compression. **Raises:** PlanError if its name has an argument."""
    if argument:
        raise PlanError(f"'packed' takes no argument. Received compression='packed/{argument}'.")
    return Packed()


def _packed(digits: Tensor) -> Tensor:
    """Return float32 [n] of whole numbers [3, n]."""
    return digits[0] + BASE * (digits[1] + BASE * digits[2])


def _unpacked(sums: Tensor) -> Tensor:
    """Return the whole numbers [3, n] of float32 [n]. A NaN makes all three NaN."""
    import tensorflow as tf

    shift = LARGEST * (1 + BASE + BASE**2)
    # The shift makes every digit >= 0
    rest = tf.cast(sums, tf.int32) + shift
    digits = []
    for _ in range(DIGITS):
        digits.append(tf.cast(rest % BASE - LARGEST, tf.float32))
        rest //= BASE
    return tf.where(tf.math.is_finite(sums), digits, float("nan"))
