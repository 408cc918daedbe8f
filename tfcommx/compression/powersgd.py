"""PowerSGD: each matrix M travels as a product P Q' of rank R, by one step of power iteration.

    P = M Q            summed over the ranks, then made orthonormal
    Q = M' P           summed over the ranks; the next step begins with it (warm start)
    the sum of all M   is taken as P Q'

A kernel of a convolution is the matrix [height * width * inputs, outputs]. Vectors, and matrices of
which less than half would be saved, travel as they are, in the vector of the P.

**Source:** Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization" (2019), algorithms 1 and 2. There a residual is what the mean of all ranks
leaves of a rank's own gradient; here it is what the rank's own Q leaves, M - P (M' P)', which has
the least norm for this P, and the same sum over the ranks. As PyTorch's hook does, the warm start
is made orthonormal, too: small gradients then do not vanish in the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tfcommx.compression.compression import Add, Compression, CompressionResult, Shape, Tensor
from tfcommx.core import PlanError


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Products of rank `rank` in place of matrices."""

    # >= 1
    rank: int = 4

    def sums(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Count the entries of all P and of what travels as it is, then of all Q."""
        if not any(map(self._is_short, shapes)):
            return ()
        first = sum(
            self.rank * rows if self._is_short(shape) else math.prod(shape)
            for shape, (rows, _) in zip(shapes, map(_matrix, shapes), strict=True)
        )
        return first, sum(self.state_sizes(shapes))

    def state_sizes(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Count the entries of each Q."""
        return tuple(
            self.rank * _matrix(shape)[1] if self._is_short(shape) else 0 for shape in shapes
        )

    def first_state(self, shapes: Sequence[Shape]) -> np.ndarray:
        """Return normally distributed Q, which depend on the shapes alone."""
        parts = [
            np.random.default_rng([self.rank, *shape]).standard_normal(size, np.float32)
            for shape, size in zip(shapes, self.state_sizes(shapes), strict=True)
        ]
        return np.concatenate(parts)

    def run(self, gradients: Sequence[Tensor], state: Tensor, add: Add) -> CompressionResult:
        """Take a step of power iteration with all matrices.

        **Cost:** two sums; four passes over the gradients, of 2 R operations an entry; two
        decompositions of thin matrices for each variable.
        """
        import tensorflow as tf

        shapes = [tuple(gradient.shape) for gradient in gradients]
        short = [self._is_short(shape) for shape in shapes]
        matrices = [
            tf.reshape(gradient, _matrix(shape))
            for gradient, shape, is_short in zip(gradients, shapes, short, strict=True)
            if is_short
        ]
        others = [gradient for gradient, one in zip(gradients, short, strict=True) if not one]
        # Each Q as Q': products with the long side inside, M' P, take twice the time of P' M
        rights = _cut(state, [(self.rank, matrix.shape[1]) for matrix in matrices])
        lefts = [
            tf.matmul(matrix, tf.linalg.qr(tf.transpose(right)).q)
            for matrix, right in zip(matrices, rights, strict=True)
        ]
        first = add(_joined([*lefts, *others]))
        summed = _cut(first, [tuple(part.shape) for part in (*lefts, *others)])
        lefts = [tf.linalg.qr(left).q for left in summed[: len(lefts)]]
        own = [
            tf.matmul(left, matrix, transpose_a=True)
            for matrix, left in zip(matrices, lefts, strict=True)
        ]
        after = add(_joined(own))
        rights = _cut(after, [tuple(part.shape) for part in own])

        def products(sides: Sequence[Tensor]) -> Iterator[Tensor]:
            for left, right in zip(lefts, sides, strict=True):
                yield tf.matmul(left, right)

        return CompressionResult(
            _in_order(products(rights), iter(summed[len(lefts) :]), shapes, short),
            _in_order(products(own), iter(others), shapes, short),
            after,
        )

    def _is_short(self, shape: Shape) -> bool:
        """Tell whether at most half of a variable's entries travel as two factors."""
        rows, columns = _matrix(shape)
        return 2 * self.rank * (rows + columns) <= rows * columns


def read(argument: str) -> PowerSGD:
    """Make it from the R of "powersgd/R"; R is 4 if that is left out.

    **Raises:** PlanError for what is no rank.
    """
    if not argument:
        return PowerSGD()
    if not argument.isdecimal() or int(argument) < 1:
        raise PlanError(
            "The rank of PowerSGD must be a whole number >= 1. Received "
            f"compression='powersgd/{argument}'. 'powersgd/4' is usual."
        )
    return PowerSGD(int(argument))


def _matrix(shape: Shape) -> tuple[int, int]:
    """Return rows and columns of a variable as a matrix; a vector has one column."""
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    import tensorflow as tf

    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def _cut(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Undo `_joined`."""
    import tensorflow as tf

    parts = tf.split(flat, [math.prod(shape) for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _in_order(
    products: Iterator[Tensor],
    others: Iterator[Tensor],
    shapes: Sequence[Shape],
    short: Sequence[bool],
) -> list[Tensor]:
    """Return products and what travelled as it is in the order and the shapes of the variables."""
    import tensorflow as tf

    return [
        tf.reshape(next(products if is_short else others), shape)
        for shape, is_short in zip(shapes, short, strict=True)
    ]
