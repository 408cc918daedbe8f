"""A custom compression: each step sends another sixteenth of every large variable.

Use it as `Scheme(compression="rotating_rows:ROTATING")`; error feedback, saving, prices and any
dense route come with the family. Rows that are not sent wait in the residual until their turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfcommx.compression import Compression, CompressionResult


@dataclass(frozen=True)
class RotatingRows(Compression):
    """Cuts a variable into equal rows, and sends one of them, in turn."""

    rows: int = 16

    def _columns(self, shape):
        """Return the entries of a row; None for a variable that is sent whole."""
        size = math.prod(shape)
        return -(-size // self.rows) if size >= 8 * self.rows else None

    def sums(self, shapes):
        """Count one row of each large variable, and all of each small one."""
        return (sum(self._columns(shape) or math.prod(shape) for shape in shapes),)

    def state_sizes(self, shapes):
        """Keep the number of the next row, which is the same for all: with the first variable."""
        return (1,) + (0,) * (len(shapes) - 1)

    def run(self, gradients, state, add):
        """Send the row whose turn it is."""
        turn = tf.one_hot(tf.cast(state[0], tf.int32), self.rows)[:, None]
        mine = [self._row(gradient, turn) for gradient in gradients]
        summed = tf.split(add(tf.concat(mine, 0)), [row.shape[0] for row in mine])
        pairs = list(zip(gradients, mine, summed, strict=True))
        return CompressionResult(
            totals=[self._whole(total, gradient, turn) for gradient, _, total in pairs],
            sent=[self._whole(row, gradient, turn) for gradient, row, _ in pairs],
            state=(state + 1) % np.float32(self.rows),
        )

    def _row(self, gradient, turn):
        columns, flat = self._columns(gradient.shape), tf.reshape(gradient, [-1])
        if columns is None:
            return flat
        padded = tf.pad(flat, [[0, self.rows * columns - flat.shape[0]]])
        cut = tf.reshape(padded, [self.rows, columns])
        return cut[tf.argmax(turn[:, 0])]

    def _whole(self, row, gradient, turn):
        """Put a row in its place, with zeros around it."""
        whole = row if self._columns(gradient.shape) is None else tf.reshape(turn * row, [-1])
        return tf.reshape(whole[: math.prod(gradient.shape)], gradient.shape)


ROTATING = RotatingRows()
