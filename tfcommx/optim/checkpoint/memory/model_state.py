"""Weights and optimizers' state of a model as arrays, for a snapshot in memory."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from tfcommx.optim.checkpoint.exact import wide
from tfcommx.optim.keras_internals import finalize_layers, inner_optimizer
from tfcommx.optim.wrapped import wrapped_optimizers
from tfcommx.terms import PlanError


def copy_model(model: keras.Model) -> dict[str, np.ndarray]:
    """Copy a model's weights and the state of its wrapped optimizers, as Keras saves it.

    **Ranks:** local, after `consolidate`; with strategy="sharded" on rank 0. **Cost:** one copy.
    """
    arrays = {f"weight{number}": _copy(one) for number, one in enumerate(model.weights)}
    for place, optimizer in enumerate(wrapped_optimizers(model)):
        store: dict[str, np.ndarray] = {}
        inner_optimizer(optimizer).save_own_variables(store)
        arrays |= {f"optimizer{place}/{key}": np.array(wide(one)) for key, one in store.items()}
        for number, one in enumerate(_outer_variables(optimizer)):
            arrays[f"outer{place}/{number}"] = _copy(one)
    return arrays


def set_model(model: keras.Model, arrays: Mapping[str, np.ndarray]) -> None:
    """Give a model, and its built optimizers, the state that `copy_model` has returned.

    **Ranks:** local. **Raises:** PlanError for a model with other weights.
    """
    weights = model.weights
    stored = [arrays[name] for name in arrays if name.startswith("weight")]
    if [tuple(one.shape) for one in weights] != [one.shape for one in stored]:
        raise PlanError(
            f"A snapshot needs the model that it was taken of. It has {len(stored)} weights. "
            f"Received {model.name!r} with {len(weights)}, or with other shapes. Build the same "
            "model in each generation."
        )
    for variable, array in zip(weights, stored, strict=True):
        variable.assign(array)
    finalize_layers(model)
    for place, optimizer in enumerate(wrapped_optimizers(model)):
        first = f"optimizer{place}/"
        store = {
            name.removeprefix(first): arrays[name] for name in arrays if name.startswith(first)
        }
        inner_optimizer(optimizer).load_own_variables(store)
        for number, one in enumerate(_outer_variables(optimizer)):
            one.assign(arrays[f"outer{place}/{number}"])


def _outer_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return what an optimizer has beside the one inside of it, such as a loss scale."""
    inner = inner_optimizer(optimizer)
    if inner is optimizer:
        return []
    listed = {id(one) for one in inner.variables}
    return [one for one in optimizer.variables if id(one) not in listed]


def _copy(variable: keras.Variable) -> np.ndarray:
    # What `numpy()` returns may share the variable's memory
    return np.array(wide(variable.numpy()))
