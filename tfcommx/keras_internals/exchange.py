"""Exchange: the interface between the mixins of optimizers and an optimizer's exchanger.

This package imports no exchange, so the classes are protocols. The members are documented in their
implementations.
"""

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
    """The step under way, and the conditions that it must meet; see `optim.step_guard`."""

    # Mode of an outer LossScaleOptimizer: "none" if there is none, "local" (each rank skips alone)
    # or "agreed"
    loss_scale: str
    step: StepUnderWay

    def open_step(self) -> contextlib.AbstractContextManager[None]: ...
    def begin(
        self, variables: Sequence[keras.Variable], built: Sequence[keras.Variable]
    ) -> None: ...
    def check_exchange_ran(self, optimizer: str) -> None: ...
    def finite_on_all_ranks(self, finite: tf.Tensor) -> tf.Tensor: ...
    def mean_over_ranks(self, numbers: tf.Tensor) -> tf.Tensor: ...


class ShardVariables(Protocol):
    """This rank's shards of the weights; see `strategies.sharded.shards`."""

    variables: list[keras.Variable]
    # True if the step function pulls at its beginning; set while it is traced
    pulls_first: bool

    @property
    def decays(self) -> list[bool]: ...
    def take_from_weights(self) -> None: ...
    def scale(
        self, gradients: Sequence[tf.Tensor], factors: Mapping[str, tf.Tensor]
    ) -> list[tf.Tensor]: ...


class ShardedSteps(Protocol):
    """The steps of a strategy that shards the weights; see `strategies.sharded.strategy`."""

    def squares(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]: ...
    def pull(self, label: str) -> None: ...


class ShardedWeights(Protocol):
    """The shards of one optimizer, and their state as a whole; see `optim.sharding`."""

    # The whole variables, in forward order
    variables: list[keras.Variable]
    # The optimizer's state of each shard, by attribute
    slots: dict[str, list[keras.Variable | None]]
    # True if a step may begin with the pull
    can_pull_first: bool

    @property
    def shards(self) -> ShardVariables: ...
    @property
    def run(self) -> ShardedSteps | None: ...
    def gathered_at(self, steps: int) -> dict[str, list[np.ndarray | None]]: ...
    def load_state(self, whole: dict[str, list[np.ndarray | None]], steps: int) -> None: ...


class Exchange(Protocol):
    """The exchange of one optimizer's gradients; see `optim.exchanger`."""

    # Returns the value of `__reduce__`, by which `copy` and `pickle` recreate the optimizer
    reduce_for_pickle: Callable[..., tuple[Any, ...]]
    # Ids of the optimizer's variables before it was built ahead of its first step; None: it was
    # not, or has taken a step
    built_early: frozenset[int] | None

    @property
    def ranks(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def guard(self) -> Guard: ...
    @property
    def sharding(self) -> ShardedWeights | None: ...
    def make_sharding(
        self, variables: Sequence[keras.Variable], decays: Sequence[bool], whole: bool
    ) -> ShardedWeights: ...
    def pull_shards(self) -> None: ...
    def exchange(
        self, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor, steps: tf.Tensor
    ) -> list[tf.Tensor]: ...
    def update(
        self,
        apply: Callable[[], None],
        gradients: Sequence[tf.Tensor],
        state: Sequence[tf.Variable],
        noise_factors: Callable[[int], Sequence[tf.Tensor]],
    ) -> None: ...
    def drop_residuals_of_momenta(self) -> None: ...
    def consolidate(self, averages: Sequence[keras.Variable] = ()) -> None: ...
