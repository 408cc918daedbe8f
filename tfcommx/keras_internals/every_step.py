"""Surround the steps of all Keras optimizers in this process, including existing ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# (optimizer) -> the context manager around its step
Surroundings = Callable[[keras.optimizers.Optimizer], contextlib.AbstractContextManager[None]]


@functools.cache
def surround_steps(surroundings: Surroundings) -> None:
    """Take each step in `with surroundings(optimizer)`, until the process ends.

    Both `apply` and `apply_gradients` are surrounded, because a class may override either. One
    often calls the other, and optimizers call other optimizers (as LossScaleOptimizer does), so
    contexts may nest. A traced step is surrounded while it is traced. A second call with the same
    function has no effect.
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
