"""Callbacks by which the ranks agree: on stopping, on equal weights."""

from __future__ import annotations

import hashlib
import logging
from numbers import Integral
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.comm import process
from tfcommx.terms import PlanError

log = logging.getLogger("tfcommx")


class AgreeOnStop(keras.callbacks.Callback):
    """Stop on all ranks, after the same step, when a callback on any rank stops the training:
    TerminateOnNaN, EarlyStopping, your own.

    Without it the other ranks would wait for ever for the one that has stopped. Comes last in the
    list: it reads what the callbacks before it have decided. Not needed where all decide alike, as
    EarlyStopping does on what AverageMetrics has averaged.

    Args:
        every: steps (Keras's calls, where they are of several) after which the ranks ask each
            other, >= 1; and at each epoch's end. With more a rank that wants to stop goes on with
            the others until they ask.
    **Ranks:** all, with equal `every`. **Cost:** an allreduce of 4 bytes each time; Keras waits for
    every step.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        if not isinstance(every, Integral) or every < 1:
            raise PlanError(f"`every` must be an integer >= 1. Received {every!r}.")
        self.every, self.calls, self.wanted = every, 0, False

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls, self.wanted = 0, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls += 1
        self._agree(self.calls % self.every == 0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree(True)

    def _agree(self, ask: bool) -> None:
        self.wanted |= bool(self.model.stop_training)
        if ask:
            with tf.device("/cpu:0"):
                votes = process.current().allreduce(
                    tf.constant([float(self.wanted)]), "world", "tfcommx/stop"
                )
            self.wanted = bool(votes[0] > 0)
        self.model.stop_training = ask and self.wanted


class CompareReplicas(keras.callbacks.Callback):
    """Compare a hash of all trainable weights over the ranks at the end of every epoch.

    `identical` is True while no difference was seen. **Ranks:** all. **Raises:** RuntimeError that
    names the ranks that differ, unless `strict` is False.
    """

    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict, self.identical = strict, True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        digest = hashlib.sha256()
        for variable in self.model.trainable_variables:
            digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).tobytes())
        digests = process.current().gather_objects(digest.hexdigest())
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            self.identical = False
            message = (
                f"All ranks must hold the same trainable weights. After epoch {epoch}, "
                f"ranks {odd} differ from rank 0."
            )
            if self.strict:
                raise RuntimeError(
                    f"{message} Was the state broadcast (BroadcastState), and are all updates "
                    "exchanged?"
                )
            log.error(message)
