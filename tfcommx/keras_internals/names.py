"""Names of variables, and facts about them.

`VariableNames` are unique: plans, profiles and checkpoints refer to variables by them.
"""

import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

import keras
import tensorflow as tf

from tfcommx.keras_internals.optimizers import values_of


def path_of(variable: keras.Variable | tf.Variable) -> str:
    """Return a variable's path; of one of TensorFlow's its name.

    >>> import tensorflow as tf
    >>> path_of(tf.Variable(0.0, name="scale"))
    'scale'
    """
    plain = isinstance(variable, tf.Variable)
    return str(variable.name.partition(":")[0] if plain else variable.path)


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


# Names that broadcast_variables has agreed on, of variables whose paths differ between ranks
AGREED_NAMES: ByVariable[str] = ByVariable()


class VariableNames:
    """Unique names of variables: their paths, with a number if another has the same path."""

    def __init__(self) -> None:
        self._names: ByVariable[str] = ByVariable()
        # Also names of freed variables: ranks free them at different times, and names must be
        # equal.
        self._taken: set[str] = set()

    def of(self, variables: Sequence[keras.Variable]) -> list[str]:
        """Return the variables' names, made unique in the order of the first call."""
        return [self._names.get(variable) or self._new_name(variable) for variable in variables]

    def get(self, variable: keras.Variable | tf.Variable) -> str | None:
        """Return the name of a variable; None if it has none yet."""
        return self._names.get(variable)

    def _new_name(self, variable: keras.Variable) -> str:
        path = AGREED_NAMES.get(variable) or path_of(variable)
        name, number = path, 1
        # Parts of a model may have layers of the same name, as two networks of keras.applications
        while name in self._taken:
            number += 1
            name = f"{path}#{number}"
        self._taken.add(name)
        self._names[variable] = name
        return name

    def weights_of(self, variables: Sequence[keras.Variable]) -> dict[str, tf.Variable]:
        """Return name -> TensorFlow's variable."""
        return dict(zip(self.of(variables), values_of(variables), strict=True))

    def rename(self, variables: Sequence[keras.Variable], names: Sequence[str]) -> None:
        """Give the variables these names, which are unique."""
        self._taken -= {self._names.get(variable) for variable in variables}
        self._taken |= set(names)
        for variable, name in zip(variables, names, strict=True):
            self._names[variable] = name
