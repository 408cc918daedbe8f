"""Makes variables while a step is traced, without having it traced a second time for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Leave the graph that is being traced, as `tf.init_scope` does; variables included.

    A `tf.function` whose first trace makes a variable is traced again, because the first trace has
    the initializers in it. It counts those that `tf.init_scope` has made outside as well, which
    need no second trace: a large model would take twice as long to start.
    """

    def make(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        return next_creator(**{**options, "experimental_enable_variable_lifting": False})

    with tf.init_scope(), tf.variable_creator_scope(make):
        yield
