"""Surround the steps of all of Keras's optimizers in this process, also of those made before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# Makes what an optimizer's step is taken in
Surroundings = Callable[[keras.optimizers.Optimizer], contextlib.AbstractContextManager[None]]


@functools.cache
def surround_steps(surroundings: Surroundings) -> None:
    """Take each step in `with surroundings(optimizer)`, until the process ends.

    Both `apply` and `apply_gradients` are surrounded, for a class that overrides one of them: one
    is often called within the other, and optimizers call others (LossScaleOptimizer does). A traced
    step is surrounded while it is traced. A second call with the same function changes nothing.
    """
    for name in ("apply", "apply_gradients"):
        take = getattr(keras.optimizers.Optimizer, name)
        setattr(keras.optimizers.Optimizer, name, _surrounded(take, surroundings))


def _surrounded(take: Callable[..., Any], surroundings: Surroundings) -> Callable[..., Any]:
    @functools.wraps(take)
    def surrounded(self: keras.optimizers.Optimizer, *arguments: Any, **options: Any) -> Any:
        with surroundings(self):
            return take(self, *arguments, **options)

    unconverted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(surrounded)
    return unconverted
