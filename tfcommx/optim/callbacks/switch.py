"""Callbacks that change settings while training: the scheme, the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf

from tfcommx.comm import process
from tfcommx.optim.exchanger import by_pattern
from tfcommx.optim.keras_internals import exchanger_of
from tfcommx.terms import PlanError, Scheme


class WarmUp(keras.callbacks.Callback):
    """Raise the learning rate linearly from the rate of one rank to the full rate, over the first
    steps.

    Args:
        learning_rate: the full rate, > 0.
        steps: number of optimizer steps until it is reached, >= 1, counted by the optimizer. With
            `steps_per_execution` the rate stays for that many.
        start: the rate of the first step; None: learning_rate / number of ranks.

    **Source:** Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.
    """

    def __init__(self, learning_rate: float, steps: int, start: float | None = None) -> None:
        super().__init__()
        if learning_rate <= 0 or steps < 1:
            raise ValueError(
                f"`learning_rate` must be > 0 and `steps` >= 1. Received {learning_rate} and "
                f"{steps}."
            )
        self.learning_rate, self.steps, self.start, self.over = learning_rate, steps, start, False

    def on_train_begin(self, logs: Any = None) -> None:
        self.over = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.over:
            return
        done = int(self.model.optimizer.iterations)
        # the full rate was set, or a restored optimizer has its own
        self.over = done >= self.steps + self.model.steps_per_execution
        if not self.over:
            start = self.learning_rate / process.size() if self.start is None else self.start
            self.model.optimizer.learning_rate = start + (self.learning_rate - start) * min(
                done / self.steps, 1.0
            )


class SwitchScheme(keras.callbacks.Callback):
    """Change how gradients travel, and the resolution of the pictures, at the start of given
    epochs; nothing owed is lost.

    Args:
        schemes: epoch (from 0) -> Scheme (or pattern -> Scheme) from this epoch on.
        resolutions: epoch -> pixels from this epoch on.
        resolution: the integer tf.Variable that the input pipeline reads; needed with
            `resolutions`.

    A run that begins at a later epoch begins with what the epochs before have set.
    **Ranks:** all, with equal arguments. **Cost:** the training step is traced again after a change
    of scheme.
    """

    def __init__(
        self,
        schemes: Mapping[int, Scheme | Mapping[str, Scheme]] | None = None,
        resolutions: Mapping[int, int] | None = None,
        resolution: tf.Variable | None = None,
    ) -> None:
        super().__init__()
        if resolutions and resolution is None:
            raise ValueError(
                "`resolution`, the variable that the input pipeline reads, is required with "
                "`resolutions`. Received None."
            )
        for epoch, change in [*(schemes or {}).items(), *(resolutions or {}).items()]:
            if not isinstance(epoch, Integral) or epoch < 0:
                raise PlanError(
                    f"Epochs must be integers >= 0. Received {epoch!r}, for {change!r}."
                )
        self.schemes, self.resolutions, self.resolution = (
            dict(schemes or {}),
            dict(resolutions or {}),
            resolution,
        )
        self.first = True  # epoch of a run

    def on_train_begin(self, logs: Any = None) -> None:
        self.first = True
        for schemes in self.schemes.values():  # refuse a bad one now, not hours later
            exchanger_of(self.model).check(schemes)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        def now(changes: Mapping[int, Any]) -> Any:
            return (
                changes.get(max((start for start in changes if start <= epoch), default=epoch))
                if self.first
                else changes.get(epoch)
            )

        if (pixels := now(self.resolutions)) is not None:
            self.resolution.assign(pixels)
        scheme, exchanger, self.first = now(self.schemes), exchanger_of(self.model), False
        if scheme is not None and exchanger.schemes != by_pattern(scheme):
            exchanger.switch(scheme)
            self.model.make_train_function(force=True)
