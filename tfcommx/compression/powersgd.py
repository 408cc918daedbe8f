"""PowerSGD: each matrix M travels as a product P Q' of rank R, by one step of power iteration.

    P = M Q            summed over the ranks, then made orthonormal
    Q = M' P           summed over the ranks; the next step begins with it (warm start)
    the sum of all M   is taken as P Q'

A kernel of a convolution is the matrix [height * width * inputs, outputs]. Vectors, and matrices of
which less than half would be saved, travel uncompressed, in the vector of the P.

**Source:** Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization" (2019), algorithms 1 and 2. There a residual is a rank's gradient less
the mean result of all ranks; here it is the gradient less the product with the rank's own Q,
M - P (M' P)', which has the least norm for this P, and the same sum over the ranks. As in PyTorch's
hook, the warm start is made orthonormal, too, because small gradients would otherwise vanish in the
products.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tfcommx.compression.compression import Add, Compression, CompressionResult, Shape, Tensor
from tfcommx.core import PlanError


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Sends products of rank `rank` in place of matrices."""

    # Rank of the products, >= 1
    rank: int = 4

    def sums(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Count the entries of all P and of uncompressed variables, then of all Q."""
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
        # Seeded by the shapes, because all ranks must begin with the same Q
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
        uncompressed = [
            gradient for gradient, is_short in zip(gradients, short, strict=True) if not is_short
        ]
        # Each Q as Q', because a product over the long side as M' P takes twice the time of P' M
        rights = _cut(state, [(self.rank, matrix.shape[1]) for matrix in matrices])
        # Orthonormal, because all columns would otherwise approach the first singular vector
        lefts = [
            tf.matmul(matrix, _orthonormal(tf.transpose(right_factor)))
            for matrix, right_factor in zip(matrices, rights, strict=True)
        ]
        first = add(_joined([*lefts, *uncompressed]))
        summed = _cut(first, [tuple(part.shape) for part in (*lefts, *uncompressed)])
        # Each rank decomposes the same sums: processors of other types may round differently, and
        # the replica guard would then end the run
        lefts = list(map(_orthonormal, summed[: len(lefts)]))
        # With the same P on all ranks, so the sum of the ranks' P' M is P' times the sum of all M
        own_rights = [
            tf.matmul(left_factor, matrix, transpose_a=True)
            for matrix, left_factor in zip(matrices, lefts, strict=True)
        ]
        after = add(_joined(own_rights))
        rights = _cut(after, [tuple(part.shape) for part in own_rights])

        def products(sides: Sequence[Tensor]) -> Iterator[Tensor]:
            for left_factor, right_factor in zip(lefts, sides, strict=True):
                yield tf.matmul(left_factor, right_factor)

        return CompressionResult(
            _in_order(products(rights), iter(summed[len(lefts) :]), shapes, short),
            _in_order(products(own_rights), iter(uncompressed), shapes, short),
            after,
        )

    def _is_short(self, shape: Shape) -> bool:
        """Return True if two factors have at most half of a variable's entries."""
        rows, columns = _matrix(shape)
        return 2 * self.rank * (rows + columns) <= rows * columns


def read(argument: str) -> PowerSGD:
    """Return the compression of the R in "powersgd/R"; R is 4 if that is left out.

    **Raises:** PlanError if R is not a whole number >= 1.
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


def _orthonormal(factor: Tensor) -> Tensor:
    """Return an orthonormal basis of a factor's columns, for finite entries of any magnitude."""
    import tensorflow as tf

    # The decomposition adds squares, which overflow for entries above 1e19, and then returns NaN
    largest = tf.reduce_max(tf.abs(factor))
    return tf.linalg.qr(factor / tf.where(largest > 0, largest, 1.0)).q


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
    uncompressed: Iterator[Tensor],
    shapes: Sequence[Shape],
    short: Sequence[bool],
) -> list[Tensor]:
    """Return products and uncompressed parts in the order and the shapes of the variables."""
    import tensorflow as tf

    return [
        tf.reshape(next(products if is_short else uncompressed), shape)
        for shape, is_short in zip(shapes, short, strict=True)
    ]
