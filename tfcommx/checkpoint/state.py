"""Copy and set the state of a model and its optimizers as arrays."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from tfcommx.checkpoint.exact import wide
from tfcommx.core import CheckpointError
from tfcommx.keras_internals import finalize_layers, inner_optimizer, layers_of
from tfcommx.optim.wrapped import wrapped_optimizers


def copy_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
    """Copy the state of a wrapped optimizer, as Keras saves it.

    **Ranks:** local, after `consolidate`; with strategy="sharded" on rank 0. **Cost:** one copy.
    """
    store: dict[str, np.ndarray] = {}
    inner_optimizer(optimizer).save_own_variables(store)
    arrays = {f"inner/{key}": np.array(wide(np.asarray(value))) for key, value in store.items()}
    for number, variable in enumerate(_outer_variables(optimizer)):
        arrays[f"outer/{number}"] = _copy(variable)
    return arrays


def set_optimizer(optimizer: keras.optimizers.Optimizer, arrays: Mapping[str, np.ndarray]) -> None:
    """Set a built optimizer's state to the result of `copy_optimizer`. **Ranks:** local."""
    store = {
        name.removeprefix("inner/"): array
        for name, array in arrays.items()
        if name.startswith("inner/")
    }
    inner_optimizer(optimizer).load_own_variables(store)
    for number, variable in enumerate(_outer_variables(optimizer)):
        variable.assign(arrays[f"outer/{number}"])


def saved_by_keras(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if `model.save` writes an optimizer's state.

    Keras searches the attributes of a model and of its layers, and lists, tuples and dicts among
    these; it does not search nested containers, sets and other objects.
    """
    for layer in layers_of(model):
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else value
            if value is optimizer or (
                isinstance(value, dict | list | tuple) and any(part is optimizer for part in parts)
            ):
                return True
    return False


def _outer_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return an optimizer's variables outside of its inner optimizer, such as a loss scale."""
    inner = inner_optimizer(optimizer)
    if inner is optimizer:
        return []
    listed = {id(variable) for variable in inner.variables}
    return [variable for variable in optimizer.variables if id(variable) not in listed]


def copy_model(model: keras.Model) -> dict[str, np.ndarray]:
    """Copy a model's weights and the state of its wrapped optimizers, as Keras saves it.

    **Ranks:** local, after `consolidate`; with strategy="sharded" on rank 0. **Cost:** one copy.
    """
    arrays = {f"weight{number}": _copy(weight) for number, weight in enumerate(model.weights)}
    for position, optimizer in enumerate(wrapped_optimizers(model)):
        state = copy_optimizer(optimizer)
        arrays |= {f"optimizer{position}/{name}": array for name, array in state.items()}
    return arrays


def set_model(model: keras.Model, arrays: Mapping[str, np.ndarray]) -> None:
    """Set the state of a model and its built optimizers to the result of `copy_model`.

    **Ranks:** local. **Raises:** CheckpointError for a model with other weights.
    """
    weights = model.weights
    stored = [arrays[name] for name in arrays if name.startswith("weight")]
    if [tuple(weight.shape) for weight in weights] != [array.shape for array in stored]:
        raise CheckpointError(
            f"A snapshot needs the model that it was taken of. It has {len(stored)} weights. "
            f"Received {model.name!r} with {len(weights)}, or with other shapes. Build the same "
            "model in each generation."
        )
    for variable, array in zip(weights, stored, strict=True):
        variable.assign(array)
    finalize_layers(model)
    for number, optimizer in enumerate(wrapped_optimizers(model)):
        first = f"optimizer{number}/"
        set_optimizer(
            optimizer,
            {name.removeprefix(first): arrays[name] for name in arrays if name.startswith(first)},
        )


def _copy(variable: keras.Variable) -> np.ndarray:
    # Copied, because the result of `numpy()` may share the variable's memory
    return np.array(wide(variable.numpy()))
