"""Weights and optimizers' state of a model as arrays, for a snapshot in memory."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from tfcommx.optim.checkpoint.exact import wide
from tfcommx.optim.checkpoint.optimizer_state import copy_optimizer, set_optimizer
from tfcommx.optim.keras_internals import finalize_layers
from tfcommx.optim.wrapped import wrapped_optimizers
from tfcommx.terms import PlanError


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
        set_optimizer(
            optimizer,
            {name.removeprefix(first): arrays[name] for name in arrays if name.startswith(first)},
        )


def _copy(variable: keras.Variable) -> np.ndarray:
    # What `numpy()` returns may share the variable's memory
    return np.array(wide(variable.numpy()))
