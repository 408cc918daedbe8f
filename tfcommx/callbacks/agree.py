"""AgreeOnStop and CompareReplicas: ranks stop together, and hold equal weights."""

from typing import Any

import keras
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.core import ConfigurationError, check_whole, log
from tfcommx.optim.replica_outputs import digest_of
from tfcommx.optim.wrapped import trains_alone
from tfcommx.runtime.replica_guard import ReplicaError


class AgreeOnStop(keras.callbacks.Callback):
    """Stop on all ranks, after the same step, if a callback on any rank stops the training.

    For TerminateOnNaN, or callbacks of the user, because the other ranks would wait for the stopped
    rank. It must be the last in the list, because it reads the decision of the callbacks before it.
    Not needed if all ranks decide alike, as EarlyStopping does behind BroadcastState.

    >>> import keras
    >>> import tfcommx as cx
    >>> stop = [keras.callbacks.TerminateOnNaN(), cx.callbacks.AgreeOnStop(every=10)]

    Args:
        every: steps (calls of Keras, if `steps_per_execution` is more than 1) between two votes of
            the ranks, >= 1; they also vote at each epoch's end. With more than 1, a rank that wants
            to stop continues with the others until the vote.

    Without effect with ElasticAveraging, because the others can train without a stopped rank.

    **Ranks:** all, with equal `every`. **Cost:** an allreduce of 4 bytes per vote; Keras waits for
    every step.
    **Raises:** ConfigurationError if `every` is not an integer >= 1.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every, self.calls = check_whole("every", every, least=1), 0
        # True if a callback of this rank has requested a stop since the last vote
        self.wanted = False
        # True if ranks train alone; stored, because it takes a search of the whole model
        self.alone = False

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls, self.wanted, self.alone = 0, False, trains_alone(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls += 1
        self._agree(self.calls % self.every == 0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree(True)

    def _agree(self, ask: bool) -> None:
        if self.alone:
            return
        self.wanted |= bool(self.model.stop_training)
        if ask:
            # On the host, where the result is read at once
            with tf.device("/cpu:0"):
                votes = process.current().allreduce(
                    tf.constant([float(self.wanted)]), "world", "tfcommx/stop"
                )
            self.wanted = bool(votes[0] > 0)
        # A rank that wants to stop continues until the vote, because the others wait for it
        self.model.stop_training = ask and self.wanted


class CompareReplicas(keras.callbacks.Callback):
    """Compare a hash of all trainable weights over the ranks, after every epoch and after `fit`.

    `identical` is True until a difference is detected.

    >>> import tfcommx as cx
    >>> compare = cx.callbacks.CompareReplicas(strict=False)
    >>> compare.identical
    True

    Args:
        strict: True to raise an error; False to log it and continue.

    **Ranks:** all. **Cost:** the weights are copied to the host and hashed.
    **Raises:** ReplicaError that names the ranks that differ from rank 0.
    """

    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict, self.identical = strict, True

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a strategy with unequal weights. **Raises:** ConfigurationError."""
        if trains_alone(self.model):
            raise ConfigurationError(
                "CompareReplicas needs ranks that have equal weights. Received "
                "strategy=ElasticAveraging, with which each rank trains its own. Leave it out."
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._compare(f"epoch {epoch}")

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the final weights of `fit`, such as moving averages."""
        self._compare("the end of fit")

    def _compare(self, when: str) -> None:
        # Not the statistics of batch normalization, which follow each rank's own batches
        digests = process.current().gather_objects(digest_of(self.model.trainable_variables))
        different = [rank for rank, rank_digest in enumerate(digests) if rank_digest != digests[0]]
        if different:
            self.identical = False
            message = (
                f"All ranks must hold the same trainable weights. After {when}, "
                f"ranks {different} differ from rank 0."
            )
            if self.strict:
                raise ReplicaError(
                    f"{message} Was the state broadcast (BroadcastState), and are all updates "
                    "exchanged?"
                )
            log.error(message)
