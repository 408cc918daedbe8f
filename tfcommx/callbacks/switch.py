"""WarmUp and SwitchScheme: change the learning rate, the scheme or the resolution."""

import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfcommx.callbacks.choose_again import expect_steps
from tfcommx.collectives import process
from tfcommx.core import ConfigurationError, Scheme, check_number, check_whole
from tfcommx.keras_internals.models import trace_again
from tfcommx.keras_internals.optimizers import has_schedule, trainable_variables
from tfcommx.optim.requested_plan import by_pattern
from tfcommx.optim.wrapped import exchanger_in, optimizers_in, wrapped_optimizers


class WarmUp(keras.callbacks.Callback):
    """Raise the learning rate linearly to the full rate, over the first steps.

    >>> import tfcommx as cx
    >>> warm_up = cx.callbacks.WarmUp(0.4, steps=500)

    Args:
        learning_rate: the full rate, > 0.
        steps: number of optimizer steps until it is reached, >= 1, counted by the optimizer. The
            rate is constant within the `steps_per_execution` steps of a call.
        start: the rate of the first step; None: learning_rate / number of ranks.
        optimizer: the optimizer that warms up; None: the model's wrapped one, of `compile` or an
            attribute. A model with several needs one WarmUp for each that warms up.

    After the last step, at the latest at its epoch's end, the full rate is set, unless another
    callback, such as a LearningRateScheduler, has set another rate by then. Put it before callbacks
    that save the model.

    **Raises:** ConfigurationError for a rate or a number of steps out of range, and, before the
    first step, for an optimizer whose rate is a schedule, and without `optimizer` if the model has
    several.
    **Source:** Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.
    """

    def __init__(
        self,
        learning_rate: float,
        steps: int,
        start: float | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        super().__init__()
        self.learning_rate = check_number("learning_rate", learning_rate, "> 0")
        self.steps = check_whole("steps", steps, least=1)
        self.start = None if start is None else check_number("start", start, ">= 0")
        self.optimizer = optimizer
        # The optimizer that warms up in this run
        self._warmed: keras.optimizers.Optimizer = optimizer
        # True once the warm-up has ended in this run
        self.over = False
        # The rate that was set last
        self.last: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin the warm-up at the optimizer's number of steps."""
        self.over, self.last = False, None
        held = optimizers_in(self.model)
        if self.optimizer is None and len(held) > 1:
            names = [repr(optimizer.name) for optimizer in held]
            raise ConfigurationError(
                "WarmUp needs `optimizer` if a model has several, whose rates it cannot know. "
                f"Received a model with {', '.join(names)}. Add a WarmUp(..., optimizer=...) for "
                "each that is to warm up."
            )
        # Not `model.optimizer` first: where a training step of the user's has its own optimizer,
        # that is one which Keras has made, and which takes no steps
        self._warmed = self.optimizer or (held[0] if held else self.model.optimizer)
        if has_schedule(self._warmed):
            raise ConfigurationError(
                "WarmUp sets the optimizer's learning rate, which must be a number. Received an "
                "optimizer with a schedule. Give the schedule its own warm-up "
                "(CosineDecay has `warmup_steps`), or the optimizer a number."
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the next step."""
        if not self.over:
            self._set(int(self._warmed.iterations))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set the full rate if the warm-up has ended: schedules and files begin with it."""
        done = int(self._warmed.iterations)
        if not self.over and done >= self.steps:
            self._set(done)

    def _set(self, done: int) -> None:
        """Set the rate after `done` steps."""
        optimizer = self._warmed
        current = float(optimizer.learning_rate)
        self.over = done >= self.steps
        if done == self.steps and self.last is None:
            # A file that was saved before the full rate was set has the last step's rate
            saved = math.isclose(current, self._rate(done - 1), rel_tol=1e-6)
            self.last = current if saved else None
        # Unchanged, because a restored optimizer or a schedule may have set another rate
        if self.over and self.last != current:
            return
        optimizer.learning_rate = self._rate(done)
        # Read back, because Keras rounds it to float32
        self.last = float(optimizer.learning_rate)

    def _rate(self, done: int) -> float:
        start = self.learning_rate / process.size() if self.start is None else self.start
        return start + (self.learning_rate - start) * min(done / self.steps, 1.0)


class SwitchScheme(keras.callbacks.Callback):
    """Change the scheme of the gradients, and the resolution of the images, at given epochs.

    No residual is lost. A run that begins at a later epoch begins with the last scheme and
    resolution of the earlier epochs. All wrapped optimizers of the model change together.

    >>> import tfcommx as cx
    >>> sparse = cx.Scheme("allgather", "mstopk", density=0.01)
    >>> switch = cx.callbacks.SwitchScheme({0: cx.Scheme(), 5: sparse})

    Args:
        schemes: epoch (from 0) -> Scheme (or pattern -> Scheme) from this epoch on.
        resolutions: epoch (from 0) -> pixels from this epoch on.
        resolution: the integer tf.Variable that the input pipeline reads; needed with
            `resolutions`.

    **Ranks:** all, with equal arguments. **Cost:** the training step is traced again after a change
    of scheme.
    **Raises:** ConfigurationError without a `resolution` for `resolutions`, for a key that is not
    an epoch, and, before the first step, for a scheme that cannot be carried out.
    """

    def __init__(
        self,
        schemes: Mapping[int, Scheme | Mapping[str, Scheme]] | None = None,
        resolutions: Mapping[int, int] | None = None,
        resolution: tf.Variable | None = None,
    ) -> None:
        super().__init__()
        if resolutions and resolution is None:
            raise ConfigurationError(
                "`resolution`, the variable that the input pipeline reads, is required with "
                "`resolutions`. Received None."
            )
        for changes in (schemes or {}, resolutions or {}):
            if not isinstance(changes, Mapping):
                raise ConfigurationError(
                    f"A mapping from epochs is required, such as {{0: cx.Scheme()}}. Received "
                    f"{changes!r}."
                )
            for epoch in changes:
                check_whole("an epoch of SwitchScheme", epoch, least=0)
        self.schemes, self.resolutions = dict(schemes or {}), dict(resolutions or {})
        self.resolution = resolution
        # True until the first epoch of a run has begun
        self.first = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a scheme that cannot be carried out, at the start instead of hours later."""
        self.first = True
        for optimizer in wrapped_optimizers(self.model):
            # No variables are known yet if the first step builds the optimizer
            variables = trainable_variables(optimizer) if optimizer.built else []
            for schemes in self.schemes.values():
                exchanger_in(optimizer).requested.check(schemes, variables)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Apply the changes of this epoch."""
        pixels, scheme = self._at(self.resolutions, epoch), self._at(self.schemes, epoch)
        optimizers = wrapped_optimizers(self.model)
        if self.first or scheme is not None:
            end = min((start for start in self.schemes if start > epoch), default=None)
            for optimizer in optimizers:
                expect_steps(optimizer, self.params, epoch, end)
        self.first = False
        if pixels is not None and self.resolution is not None:
            self.resolution.assign(pixels)
        changed = False
        for exchanger in map(exchanger_in, optimizers):
            # An equal scheme would drop the plans and trace the step again for nothing
            if scheme is not None and exchanger.requested.schemes != by_pattern(scheme):
                exchanger.switch(scheme)
                changed = True
        if changed:
            trace_again(self.model)

    def _at(self, changes: Mapping[int, Any], epoch: int) -> Any:
        """Return the change of this epoch; in a run's first epoch, the last change so far."""
        if self.first:
            epoch = max((start for start in changes if start <= epoch), default=epoch)
        return changes.get(epoch)
