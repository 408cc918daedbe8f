"""Exchange: the interface between the mixins of optimizers and an optimizer's exchanger.

This package imports no exchange, so the class is a protocol. Its members are documented in
`optim.exchanger`.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
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
    # The step under way, and the conditions that it must meet: a StepGuard of `optim.step_guard`
    @property
    def guard(self) -> Any: ...

    # The shards of the weights, and their state as a whole: a Sharding of `optim.sharding`; or None
    @property
    def sharding(self) -> Any: ...
    def make_sharding(
        self, variables: Sequence[keras.Variable], decays: Sequence[bool], whole: bool
    ) -> Any: ...
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
