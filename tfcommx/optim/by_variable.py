"""ByVariable: facts about variables, in a mapping and not as attributes."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import keras
import tensorflow as tf

T = TypeVar("T")


class ByVariable(Generic[T]):
    """A mapping whose keys are variables, by identity; a freed variable is removed.

    An attribute would be in each copy and pickle of the variable. `WeakKeyDictionary` compares
    keys by `==` and needs their hash; Keras's variables compare their entries, and have none.

    The mapping keeps its values alive: a value that refers to its variable keeps it forever.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[keras.Variable | tf.Variable], T]] = {}

    def get(self, variable: keras.Variable | tf.Variable) -> T | None:
        """Return the value of a variable; None if it has none."""
        entry = self._entries.get(id(variable))
        return None if entry is None else entry[1]

    def __setitem__(self, variable: keras.Variable | tf.Variable, value: T) -> None:
        key, entries = id(variable), self._entries
        # Called before another object can have the same id
        reference = weakref.ref(variable, lambda _: entries.pop(key, None))
        entries[key] = reference, value
