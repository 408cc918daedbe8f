"""Exchange: the interface between the mixins of optimizers and an optimizer's exchanger.

This package imports no exchange, so the classes are protocols. `tfcommx.optim` implements them:
Exchange by Exchanger, Guard by StepGuard, ShardedWeights by Sharding.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf


class StepUnderWay(threading.local):
    """The step that an optimizer takes in this thread; tf.distribute has one thread per replica."""

    # True inside a step, where Keras would clip; False if clipping is called from elsewhere
    clips = False
    # The last gradient of this step: operations that must not run without data wait for it
    gradient: Sequence[tf.Tensor] = ()
    # The variables of the gradients. Not an attribute of the optimizer, because Keras would treat a
    # list there as part of its state
    variables: Sequence[keras.Variable] = ()
    # Position of a variable -> norm of its mean gradient, float32 scalar, where the norm of the
    # received gradient is larger, because it includes rounding errors
    norms_of: Mapping[int, tf.Tensor] = {}
    # True if the gradients were exchanged
    exchange_ran = False
    # Open until the step's end
    scope: contextlib.ExitStack | None = None


class Guard(Protocol):
    """The step under way, and the conditions that it must meet."""

    # Mode of an outer LossScaleOptimizer: "none" if there is none, "local" (each rank skips alone)
    # or "agreed"
    loss_scale: str
    step: StepUnderWay

    def open_step(self) -> contextlib.AbstractContextManager[None]:
        """Begin a step that has exchanged nothing yet; open its scope."""

    def begin(self, variables: Sequence[keras.Variable], built: Sequence[keras.Variable]) -> None:
        """Record the variables of the next gradients; refuse any that would fail or hang later."""

    def check_exchange_ran(self, optimizer: str) -> None:
        """Refuse an optimizer whose step bypassed the exchange."""

    def finite_on_all_ranks(self, finite: tf.Tensor) -> tf.Tensor:
        """Return True if `finite` (bool) holds on every rank."""

    def mean_over_ranks(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return numbers, equal across ranks up to rounding, with the same bits on every rank."""


class ShardVariables(Protocol):
    """This rank's shards of the weights."""

    variables: list[keras.Variable]
    # True if the step function pulls at its beginning; set while it is traced
    pulls_first: bool

    @property
    def decays(self) -> list[bool]:
        """For each variable, True if weight decay applies to it."""

    def take_from_weights(self) -> None:
        """Set the shards to their entries of the weights, if the weights are current."""

    def scale(
        self, gradients: Sequence[tf.Tensor], factors: Mapping[str, tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the gradients of shards, with each variable's part scaled by its factor."""


class ShardedSteps(Protocol):
    """The steps of a strategy that shards the weights."""

    def squares(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the sum of squares of each whole gradient, by path. **Ranks:** all."""

    def pull(self, label: str) -> None:
        """Set the weights to the shards of all ranks. **Ranks:** all."""


class ShardedWeights(Protocol):
    """The shards of one optimizer, and their state as a whole."""

    # The whole variables, in forward order
    variables: list[keras.Variable]
    # The optimizer's state of each shard, by attribute
    slots: dict[str, list[keras.Variable | None]]
    # True if a step may begin with the pull
    can_pull_first: bool

    @property
    def shards(self) -> ShardVariables:
        """This rank's shards."""

    @property
    def run(self) -> ShardedSteps | None:
        """The run of the strategy, from the first step on."""

    def gathered_at(self, steps: int) -> dict[str, list[np.ndarray | None]]:
        """Return the state of whole variables, gathered on rank 0 at this step."""

    def set_state(self, whole: dict[str, list[np.ndarray | None]]) -> None:
        """Load this rank's part of a state of whole variables."""


class Exchange(Protocol):
    """The exchange of one optimizer's gradients."""

    # Returns the value of `__reduce__`, by which `copy` and `pickle` recreate the optimizer
    reduce_for_pickle: Callable[..., tuple[Any, ...]]

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def guard(self) -> Guard:
        """The step under way."""

    @property
    def sharding(self) -> ShardedWeights | None:
        """The optimizer's shards, from its build on; None if the strategy does not shard."""

    def make_sharding(
        self, variables: Sequence[keras.Variable], decays: Sequence[bool], whole: bool
    ) -> ShardedWeights:
        """Make the optimizer's shards."""

    def pull_shards(self) -> None:
        """Set the weights to the shards of all ranks. **Ranks:** all, outside of traced code."""

    def exchange(
        self, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor, steps: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return the gradients that the optimizer continues with. **Ranks:** all."""

    def update(
        self,
        apply: Callable[[], None],
        gradients: Sequence[tf.Tensor],
        state: Sequence[tf.Variable],
        noise_factors: Callable[[int], Sequence[tf.Tensor]],
    ) -> None:
        """Let the strategy apply the update. **Ranks:** all."""

    def drop_residuals_of_momenta(self) -> None:
        """Set the residuals of momenta to 0, in a step. **Ranks:** all."""

    def consolidate(self, averages: Sequence[keras.Variable] = ()) -> None:
        """Make weights and their moving averages whole and equal. **Ranks:** all."""
