"""The state of one optimizer as arrays, and which optimizers Keras's own file holds."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from tfcommx.optim.checkpoint.exact import wide
from tfcommx.optim.keras_internals import inner_optimizer, layers_of


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
