"""The steps of a run: its position, the calls of `fit` that remain, and the counter.

Phases of 2 and 1 epochs of 10 steps, resumed after step 4 of the second epoch:

epoch 0 |==========| done
epoch 1 |====      | FitCall(phase 0, epochs 1 to 2, step 4): six steps remain
epoch 2 |          | FitCall(phase 1, epochs 2 to 3, step 0)

`Timing` divides the seconds of an epoch into kinds.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfcommx.kernels.traced import after
from tfcommx.optim.wrapped import exchanger_of


class Position(NamedTuple):
    """The next step of a run."""

    # From 0; equal to the number of epochs at the end of the run
    epoch: int
    # Number in the epoch, from 0
    step: int = 0


class FitCall(NamedTuple):
    """Epochs of one phase that one call of `fit` trains."""

    # Number of the phase, from 0
    phase: int
    # Epochs, counted over the whole run; a single one if `step` is not 0
    epochs: range
    # First step of the first epoch
    step: int = 0


def fit_calls(phases: Sequence[int], start: Position, one_by_one: bool = False) -> list[FitCall]:
    """Return the calls of `fit` that remain of a run.

    >>> fit_calls([2, 1], Position(1, 4))
    [FitCall(phase=0, epochs=range(1, 2), step=4), FitCall(phase=1, epochs=range(2, 3), step=0)]

    Args:
        phases: epochs of each phase, >= 1.
        start: the first step.
        one_by_one: make a call for each epoch; data is then not read ahead over its end.
    """
    calls, end = [], 0
    for number, epochs in enumerate(phases):
        first, end = max(end, start.epoch), end + epochs
        if first < end and first == start.epoch and start.step:
            calls.append(FitCall(number, range(first, first + 1), start.step))
            first += 1
        if one_by_one:
            calls += [FitCall(number, range(epoch, epoch + 1)) for epoch in range(first, end)]
        elif first < end:
            calls.append(FitCall(number, range(first, end)))
    return calls


class StepCounter(keras.callbacks.Callback):
    """Counts epochs and steps of the whole run, also in a resumed epoch; the first callback."""

    def __init__(self) -> None:
        super().__init__()
        # The current step, or the last one
        self.position = Position(0)
        # Steps of the epoch; its measured steps; number of the phase
        self.steps, self.measured, self.phase = 0, 0, 0
        self._offset = 0
        # Steps of the first epoch that an earlier process measured
        self._continued = 0

    def continue_from(self, steps: int) -> None:
        """Add steps that an earlier process measured to the epoch that begins next."""
        self._continued = steps

    def begin(self, call: FitCall, steps: int) -> None:
        """Prepare for a call of `fit`; `steps` are those of one whole epoch."""
        self.phase, self.steps, self._offset = call.phase, steps, call.step

    @property
    def after(self) -> Position:
        return self.position._replace(step=self.position.step + 1)

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.position = Position(epoch, self._offset)
        self.measured, self._continued = self._continued, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # Keras counts from the start of this process's part of the epoch
        self.position = self.position._replace(step=self._offset + batch)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.measured += 1


# Kinds of measured seconds of an epoch; `other` is the rest
KINDS = ("data", "compute", "gradients", "update", "first_step", "evaluation", "saving")
# Kinds that belong to training steps
STEP_KINDS = ("data", "compute", "gradients", "update", "first_step")


class Timing(keras.callbacks.Callback):
    """Divides the seconds of an epoch on this rank into kinds.

        begin        arrived              ready      exchanged      end
          |   data      |     compute       | gradients |   update   |

    - `compute` includes the selection and exchange that it hides.
    - `gradients` is exposed selection and exchange, including the wait for slower ranks.
    - `first_step` is the whole first step of each `fit` and after each change of scheme, which
      TensorFlow traces and compiles.
    - `evaluation` and `saving` are measured by Evaluation and SaveAndStop.
    - `other` is the rest of the epoch: averaging, comparing, reporting.
    """

    def __init__(self) -> None:
        super().__init__()
        # Seconds since 1970, by TensorFlow's clock
        self.arrived, self.ready, self.exchanged = (
            tf.Variable(0.0, dtype=tf.float64, trainable=False) for _ in range(3)
        )
        self.seconds = dict.fromkeys(KINDS, 0.0)
        # Steps of the epoch whose time is in `first_step`
        self.first_steps = 0
        # Seconds of the current epoch in an earlier process, and its start time in this one
        self._before, self._epoch_start = 0.0, time.monotonic()
        # Seconds and first steps of the first epoch that an earlier process measured
        self._continued: tuple[dict[str, float], int] = {}, 0
        self.first = True

    def continue_from(self, seconds: dict[str, float], first_steps: int) -> None:
        """Add the measurements of an earlier process to the epoch that begins next."""
        self._continued = seconds, first_steps

    def watch(self, model: keras.Model) -> None:
        """Make the model's training step record the times at which batch and gradients arrive."""
        train_step, exchanger = model.train_step, exchanger_of(model)
        exchange, queued = exchanger.exchange, exchanger.comm.progress.ends_when_queued
        # Not through `self`, which has the model, because an exchanger must not keep it alive
        arrived, ready, exchanged = self.arrived, self.ready, self.exchanged

        def timed_step(data: Any) -> Any:
            with _stamped(arrived, tf.nest.flatten(data)):
                return train_step(data)

        @tf.autograph.experimental.do_not_convert
        def timed_exchange(
            gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor, steps: tf.Tensor
        ) -> list[tf.Tensor]:
            with _stamped(ready, gradients, queued):
                pass
            result: list[tf.Tensor] = exchange(gradients, learning_rate, steps)
            with _stamped(exchanged, result, queued):
                pass
            return result

        model.train_step, exchanger.exchange = timed_step, timed_exchange

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self.first = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        seconds, self.first_steps = self._continued
        self.seconds = {kind: seconds.get(kind, 0.0) for kind in KINDS}
        self._before, self._continued = sum(seconds.values()), ({}, 0)
        self._epoch_start = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # A change of scheme drops the plans, and the step is traced again
        self.first |= not exchanger_of(self.model).runs
        self.batch_start = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        end, seconds = time.monotonic(), self.seconds
        # TensorFlow has no monotonic clock, and its clock may be set while the run lasts. Within
        # the step, so that the parts of a step in which it is set still sum to the step
        offset = time.time() - end
        arrived, ready, exchanged = (
            min(max(float(stamp.numpy()) - offset, self.batch_start), end)
            for stamp in (self.arrived, self.ready, self.exchanged)
        )
        if self.first:
            seconds["first_step"] += end - self.batch_start
            self.first_steps += 1
        else:
            seconds["data"] += arrived - self.batch_start
            # Only some steps exchange accumulated gradients; times of earlier steps are ignored
            ready, exchanged = max(ready, arrived), max(exchanged, arrived)
            if exchanged == arrived:
                ready = exchanged = end
            seconds["compute"] += ready - arrived
            seconds["gradients"] += exchanged - ready
            seconds["update"] += end - exchanged
        self.first = False

    def step_seconds(self) -> float:
        """Return the seconds in training steps of the epoch so far."""
        return sum(self.seconds[kind] for kind in STEP_KINDS)

    def epoch_seconds(self) -> dict[str, float]:
        """Return the epoch's seconds by kind; they sum to its wall-clock time."""
        total = self._before + time.monotonic() - self._epoch_start
        return {**self.seconds, "other": total - sum(self.seconds.values())}


def _stamped(stamp: tf.Variable, tensors: Sequence[Any], queued: bool = False) -> Any:
    """Record in the graph when all tensors are ready, in seconds; operations inside wait for it."""
    with tf.control_dependencies(list(tensors)):
        if not queued:
            stamped = stamp.assign(tf.timestamp())
            return tf.control_dependencies([stamped])
        # Horovod ends a collective before its result exists, so that operations inside wait only
        # until the tensors are queued
        parts = tf.nest.flatten(tensors, expand_composites=True)
        arrived = after(tf.constant(1.0, tf.float64), parts)
        with tf.control_dependencies([arrived]):
            queued_time = tf.timestamp()
        stamp.assign(tf.maximum(queued_time, arrived))
    return tf.control_dependencies(list(tensors))
