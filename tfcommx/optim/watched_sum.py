"""FiniteAgreement: do all ranks have finite gradients? For loss scaling, which skips steps."""

from __future__ import annotations

import tensorflow as tf

from tfcommx.comm.base import Comm


class FiniteAgreement:
    """One small collective a step, in a scope of its own, that the stall watch knows."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self._scope = comm, ""
        self._waits = comm.progress.of_exchange(["the agreement on finite gradients"], False)

    def everywhere(self, finite: tf.Tensor) -> tf.Tensor:
        """Tell whether `finite` (bool) holds on every rank.

        **Ranks:** all. **Cost:** one allreduce of 4 bytes.
        """
        bad = tf.reshape(tf.cast(tf.logical_not(finite), tf.float32), [1])
        self._scope = self._scope or self._comm.own_scope()
        number = self._waits.begin([bad])
        with self._comm.scope(self._scope):
            bad = self._comm.allreduce(bad, "world", "finite")
        self._waits.end(0, [bad], number)
        return tf.equal(bad[0], 0)
