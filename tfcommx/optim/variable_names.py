"""Unique names of a model's variables, for plans and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf


def path_of(variable: keras.Variable | tf.Variable) -> str:
    """Return a variable's path; of one of TensorFlow's its name.

    >>> import tensorflow as tf
    >>> path_of(tf.Variable(0.0, name="scale"))
    'scale'
    """
    return variable.name.partition(":")[0] if isinstance(variable, tf.Variable) else variable.path


class VariableNames:
    """Unique names of variables: their paths, with a number if another has the same path."""

    def __init__(self) -> None:
        # By id, which is the variable's own as long as the variable is held here
        self._names: dict[int, tuple[str, keras.Variable]] = {}

    def of(self, variables: Sequence[keras.Variable]) -> list[str]:
        """Return the variables' names, made unique in the order of the first call.

        A variable whose name broadcast_variables has agreed on with the other ranks has that one.
        Parts of a model may have layers of the same name, as two networks of keras.applications
        have.
        """
        taken = {name for name, _ in self._names.values()}
        for variable in variables:
            if id(variable) not in self._names:
                path = getattr(variable, "tfcommx_name", None) or path_of(variable)
                name, number = path, 1
                while name in taken:
                    number += 1
                    name = f"{path}#{number}"
                taken.add(name)
                self._names[id(variable)] = name, variable
        return [self._names[id(variable)][0] for variable in variables]

    def rename(self, variables: Sequence[keras.Variable], names: Sequence[str]) -> None:
        """Give the variables these names, which are unique."""
        for variable, name in zip(variables, names, strict=True):
            self._names[id(variable)] = (name, variable)
