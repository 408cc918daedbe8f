"""The state of a model and of its optimizers as arrays, and what Keras's own file holds of it."""

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
        # What `numpy()` returns may share the variable's memory
        arrays[f"outer/{number}"] = np.array(wide(variable.numpy()))
    return arrays


def set_optimizer(optimizer: keras.optimizers.Optimizer, arrays: Mapping[str, np.ndarray]) -> None:
    """Give a built optimizer the state that `copy_optimizer` has returned. **Ranks:** local."""
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

    Keras looks at the attributes of a model and of its layers, and into lists, tuples and dicts
    among these; not into what those hold in turn, nor into sets and other objects.
    """
    for layer in layers_of(model):
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else value
            if value is optimizer or (
                isinstance(value, dict | list | tuple) and any(one is optimizer for one in parts)
            ):
                return True
    return False


def _outer_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return what an optimizer has beside the one inside of it, such as a loss scale."""
    inner = inner_optimizer(optimizer)
    if inner is optimizer:
        return []
    listed = {id(one) for one in inner.variables}
    return [one for one in optimizer.variables if id(one) not in listed]


def copy_model(model: keras.Model) -> dict[str, np.ndarray]:
    """Copy a model's weights and the state of its wrapped optimizers, as Keras saves it.

    **Ranks:** local, after `consolidate`; with strategy="sharded" on rank 0. **Cost:** one copy.
    """
    arrays = {f"weight{number}": _copy(one) for number, one in enumerate(model.weights)}
    for place, optimizer in enumerate(wrapped_optimizers(model)):
        state = copy_optimizer(optimizer)
        arrays |= {f"optimizer{place}/{name}": array for name, array in state.items()}
    return arrays


def set_model(model: keras.Model, arrays: Mapping[str, np.ndarray]) -> None:
    """Give a model, and its built optimizers, the state that `copy_model` has returned.

    **Ranks:** local. **Raises:** CheckpointError for a model with other weights.
    """
    weights = model.weights
    stored = [arrays[name] for name in arrays if name.startswith("weight")]
    if [tuple(one.shape) for one in weights] != [one.shape for one in stored]:
        raise CheckpointError(
            f"A snapshot needs the model that it was taken of. It has {len(stored)} weights. "
            f"Received {model.name!r} with {len(weights)}, or with other shapes. Build the same "
            "model in each generation."
        )
    for variable, array in zip(weights, stored, strict=True):
        variable.assign(array)
    finalize_layers(model)
    for place, optimizer in enumerate(wrapped_optimizers(model)):
        first = f"optimizer{place}/"
        set_optimizer(
            optimizer,
            {name.removeprefix(first): arrays[name] for name in arrays if name.startswith(first)},
        )


def _copy(variable: keras.Variable) -> np.ndarray:
    # What `numpy()` returns may share the variable's memory
    return np.array(wide(variable.numpy()))
