"""What Keras writes into a file of a model, without writing it."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.saving import saving_lib

from tfcommx.optim.keras_internals.models import layers_of, own_variables


def saved_values(model: keras.Model) -> list[Any]:
    """Return the variables and tensors that `model.save` would write, without its optimizer."""
    store = saving_lib.NpzIOStore("unwritten", mode="w")  # Its file is written by close()
    saving_lib._save_state(model, store, None, "", {id(model.optimizer)})
    return [value for part in store.contents.values() for value in part.values()]


def variables_with_own_files(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of layers whose class, not Keras's, saves or loads them its own way."""
    usual = keras.layers.Layer
    return [
        variable
        for layer in layers_of(model)
        if not type(layer).__module__.startswith("keras.")
        and (
            type(layer).save_own_variables is not usual.save_own_variables
            or type(layer).load_own_variables is not usual.load_own_variables
        )
        for variable in own_variables(layer)
    ]
