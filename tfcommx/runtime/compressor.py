"""Compressor: send a bucket's gradients by a compression; keep the rest as residual."""

from __future__ import annotations

import tensorflow as tf

from tfcommx import compression, routes
from tfcommx.comm.base import Comm
from tfcommx.routes.compressed import vectors
from tfcommx.runtime.flat import flatten, unflatten
from tfcommx.runtime.residuals import BucketState
from tfcommx.terms import Bucket
from tfcommx.wire import codec


class Compressor:
    """The compression of one bucket on this rank, with error feedback around it.

    A rank whose gradients are not finite sends NaN: so all ranks see it, whatever the compression.
    """

    def __init__(self, bucket: Bucket, state: BucketState, comm: Comm) -> None:
        """Resolve what is needed for a bucket that compresses."""
        self.bucket, self.state, self._comm = bucket, state, comm
        self._compression = compression.get(bucket.compression)
        self._route = routes.get(bucket.route)
        self._vectors = vectors(bucket, self._route, comm.topology)

    def exchange(self, flat: tf.Tensor) -> tf.Tensor:
        """Return the sum over the ranks of what each sent of gradient + residual.

        What is not sent stays in the residual, to float32 rounding. If something that was summed
        is NaN or infinite, the residual and the state of the compression stay as they were: so
        neither ever holds such a number.

        Args:
            flat: float32 [bucket.padded].

        **Ranks:** all; the result has the same bits on each.
        **Cost:** the compression's, its sums, and some 9 passes over the vector: four of them are
        copies between the vector and its variables, two look for NaN.
        """
        state = self.state
        whole = flat + state.residual
        shapes = [tf.TensorSpec(shape) for shape in self.bucket.shapes]
        parts = unflatten(whole, shapes, self.bucket)
        waiting = iter(self._vectors)
        # Whatever a compression leaves out of its vectors, a NaN or Inf must reach all ranks
        poison = tf.where(_is_finite(whole), 0.0, float("nan"))
        sums = []

        def add(vector: tf.Tensor) -> tf.Tensor:
            sums.append(self._add(vector + poison, next(waiting, None)))
            return sums[-1]

        done = self._compression.run(parts, state.compression.value(), add)
        if next(waiting, None) is not None:
            raise self._miscounted()
        stays = whole - flatten(done.sent, self.bucket)
        # Equal on all ranks; what stays is this rank's own
        usable = tf.reduce_all([_is_finite(one) for one in (*sums, done.state)])
        _assign_if(usable, state.compression, done.state)
        _assign_if(usable & _is_finite(stays), state.residual, stays)
        return flatten(done.totals, self.bucket)

    def _add(self, vector: tf.Tensor, described: Bucket | None) -> tf.Tensor:
        """Return the sum of one of the compression's vectors over the ranks."""
        if described is None or vector.shape != [described.size]:
            raise self._miscounted()
        padded = flatten([vector], described)
        total = self._route.run(padded, described, self._comm, codec.Codec())
        return total[: described.size]

    def _miscounted(self) -> ValueError:
        return ValueError(
            f"The compression {self.bucket.compression!r} must add the vectors that its `sums` "
            f"counts: of {[one.size for one in self._vectors]} entries for the shapes "
            f"{list(self.bucket.shapes)}. It added others."
        )


def _assign_if(wanted: tf.Tensor, variable: tf.Variable, value: tf.Tensor) -> None:
    """Assign if `wanted`; not by tf.where, which would make a copy."""
    variable.assign(tf.cond(wanted, lambda: value, variable.value))


def _is_finite(vector: tf.Tensor) -> tf.Tensor:
    """Tell whether no entry is NaN or infinite, and their sum is not: in one pass, as none else."""
    return tf.math.is_finite(tf.reduce_sum(vector))
