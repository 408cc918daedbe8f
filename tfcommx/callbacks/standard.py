"""Standard: the callbacks that nearly every training over several ranks needs."""

from typing import Any

import keras

from tfcommx.callbacks.agree import AgreeOnStop
from tfcommx.callbacks.average import AverageBatchNorm
from tfcommx.callbacks.broadcast_state import BroadcastState
from tfcommx.callbacks.choose_again import ChooseAgain
from tfcommx.core import ConfigurationError


class Standard(keras.callbacks.CallbackList):
    """Start all ranks alike, average batch norm and metrics, stop on all ranks or on none.

    Replaces BroadcastState, ChooseAgain, AverageBatchNorm and AgreeOnStop.
    Callbacks that read metrics or may stop the training are passed as arguments, so that they run
    after the averages and before the agreement on a stop.

    >>> import keras
    >>> import tfcommx as cx
    >>> callbacks = [cx.callbacks.Standard(keras.callbacks.EarlyStopping(patience=3))]

    Args:
        callbacks: callbacks that read metrics or may stop the training, such as
            EarlyStopping, ReduceLROnPlateau and TerminateOnNaN.
        root: the rank whose state all ranks begin with, in [0, size).
        compare: True to compare the models of the ranks, as BroadcastState does.

    **Ranks:** all, with equal arguments. **Cost:** as its parts; Keras waits for every step.
    """

    def __init__(
        self, *callbacks: keras.callbacks.Callback, root: int = 0, compare: bool = True
    ) -> None:
        # Kept, because it averages metrics
        self._first = BroadcastState(root, compare)
        parts = [self._first, ChooseAgain(), AverageBatchNorm()]
        super().__init__([*parts, *callbacks, AgreeOnStop()])

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin the parts. **Raises:** ConfigurationError if `fit` took this for its whole list."""
        if getattr(self, "model", None) is None:
            raise ConfigurationError(
                "Standard must be one of the callbacks of `fit`, which Keras gives the model. "
                "Received it as the list itself. Pass callbacks=[cx.callbacks.Standard(...)]."
            )
        super().on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Call the parts with the logs that callbacks behind this one receive.

        Overridden because Keras's list passes a copy, and History would keep this rank's metrics.
        """
        for callback in self.callbacks:
            callback.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the parts, and replace the metrics in the logs."""
        super().on_train_end(logs)
        self._first.metrics.on_train_end(logs)
