"""WatchedSum: a small sum over the ranks within a step, which the stall watch can name."""

from __future__ import annotations

import tensorflow as tf

from tfcommx.comm.base import Comm


class WatchedSum:
    """One sum over all ranks, in a scope of its own.

    Args:
        comm: of this rank.
        name: of the collective.
        what: is summed, for people.
    """

    def __init__(self, comm: Comm, name: str, what: str) -> None:
        self._comm, self._name = comm, name
        # Taken by the first sum, which all ranks compute; one rank alone may make an optimizer
        self._scope = ""
        self._waits = comm.progress.of_exchange([what], counted=False)

    def __call__(self, mine: tf.Tensor) -> tf.Tensor:
        """Return the sum over all ranks. **Ranks:** all. **Cost:** one allreduce."""
        number = self._waits.begin([mine])
        self._scope = self._scope or self._comm.own_scope()
        with self._comm.scope(self._scope):
            total = self._comm.allreduce(mine, "world", self._name)
        self._waits.end(0, [total], number)
        return total
