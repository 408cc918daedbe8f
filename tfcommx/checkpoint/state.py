"""The state of a model and its optimizers as arrays, and its exact restoration.

A layer may save its variables in another form: with LoRA, Dense saves its kernel with the adapters
added and loads adapters of zeros; a quantized layer with LoRA rounds them into its integers.
Therefore rank 0's file has a digest of each variable of the model and of its optimizers, and the
variables that model.save would alter or omit, and a restored model is compared bit for bit.
"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfcommx.checkpoint.files import arrays_in
from tfcommx.core import CheckpointError
from tfcommx.keras_internals.models import (
    finalize_layers,
    layers_of,
    saved_values,
    variables_with_own_files,
)
from tfcommx.keras_internals.names import path_of
from tfcommx.keras_internals.optimizers import array_of, entries_of, inner_optimizer
from tfcommx.optim.replica_forms import tables_of
from tfcommx.optim.wrapped import wrapped_optimizers

REMEDY = (
    "Build and compile the model as it was when it was saved: the same layers, dtypes, LoRA and "
    "quantization."
)


def wide(array: np.ndarray) -> np.ndarray:
    """Return an array of a type that NumPy's files can hold: float32 in place of bfloat16."""
    if array.dtype.kind in "biu":  # float64 does not hold all 64 bits
        return array
    # NumPy's format has no bfloat16, and would write its entries as two bytes without a type
    return array.astype(np.promote_types(array.dtype, np.float32), copy=False)


def exact_arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """Return digests of a model's state, and its variables that Keras's file will not hold.

    **Ranks:** local. **Cost:** one pass over the weights and the state of optimizers.
    """
    values = [entries_of(weight) for weight in model.weights]
    digests = [_digest(value) for value in values]
    lost = _lost(model, digests)
    content = {
        "weights": digests,
        "optimizers": [_digests(_state_of(wrapped)) for wrapped in wrapped_optimizers(model)],
        "tables": tables_of(model),
    }
    arrays = {f"exact{position}": wide(values[position]) for position in lost}
    return {"exact": np.array(json.dumps(content)), **arrays}


def restore_exact(model: keras.Model, path: Path, same_optimizers: Sequence[bool]) -> None:
    """Set the variables that Keras has not loaded exactly; refuse a model that still differs.

    Args:
        model: the model into which Keras has loaded its file.
        path: rank 0's file.
        same_optimizers: for each wrapped optimizer, in order, True if it must have the saved state.

    **Ranks:** local. **Cost:** one pass over the weights and the state of optimizers.
    **Raises:** CheckpointError that names the first different variable or layer.
    """
    with arrays_in(path, "Rank 0's file of a checkpoint") as stored:
        content = json.loads(str(stored["exact"]))
        # `_require_equal` names the difference if the numbers differ
        if len(content["weights"]) == len(model.weights):
            for position, variable in enumerate(model.weights):
                name = f"exact{position}"
                if name in stored and stored[name].shape == tuple(variable.shape):
                    variable.assign(stored[name])
    _require_equal(model.weights, content["weights"], "the model", path)
    pairs = zip(wrapped_optimizers(model), content["optimizers"], same_optimizers, strict=True)
    for optimizer, digests, same in pairs:
        if same:
            _require_equal(optimizer.variables, digests, f"the optimizer {optimizer.name!r}", path)
    tables = tables_of(model)
    for layer, table in content["tables"].items():
        if tables.get(layer) != table:
            raise CheckpointError(
                f"A restored model must have the vocabularies and bins that it was saved with, "
                f"which are no variables. Received, for layer {layer}, "
                f"{tables.get(layer)}; {path.parent} has {table}. Give the layer the same "
                "vocabulary, or adapt it to the same data, before `restore`."
            )


def _require_equal(
    variables: Sequence[keras.Variable], digests: Sequence[str], owner: str, path: Path
) -> None:
    if len(variables) != len(digests):
        raise CheckpointError(
            f"A restored model must hold exactly the saved variables. Received {len(variables)} "
            f"variables of {owner}; {path.parent} has {len(digests)}. {REMEDY}"
        )
    for variable, saved, loaded in zip(variables, digests, _digests(variables), strict=True):
        if saved != loaded:
            raise CheckpointError(
                f"A restored model must hold exactly the saved variables. Received "
                f"{path_of(variable)!r} of {owner}, which is {loaded} after loading and was "
                f"{saved} (dtype, shape, digest) in {path.parent}. {REMEDY}"
            )


def _lost(model: keras.Model, digests: Sequence[str]) -> list[int]:
    """Return the positions of variables whose values model.save would not write."""
    positions = {id(variable): position for position, variable in enumerate(model.weights)}
    saved, extra_digests = set(), []
    for value in saved_values(model):
        if id(value) in positions:
            saved.add(positions[id(value)])
        else:
            extra_digests.append(_digest(entries_of(value)))
    # Layers may save copies of variables, which are found by their values, and
    # counted, because two variables with equal values need two saved copies
    spare = Counter(extra_digests)
    special = map(id, variables_with_own_files(model))
    lost = {positions[identity] for identity in special if identity in positions}
    for position in sorted(set(positions.values()) - saved - lost):
        if spare[digests[position]]:
            spare[digests[position]] -= 1
        else:
            lost.add(position)
    return sorted(lost)


def _state_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return an optimizer's state as Keras's file has it: of whole variables, in order."""
    if not hasattr(inner_optimizer(optimizer), "whole_values"):
        return list(optimizer.variables)
    # Not the shards of this rank, because another strategy has none
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return list(store.values())


def _digests(variables: Sequence[Any]) -> list[str]:
    return [_digest(entries_of(variable)) for variable in variables]


def _digest(array: np.ndarray) -> str:
    # Dtype and shape are part of it, because zeros of every type have the same bytes
    crc = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{array.dtype.name}{list(array.shape)}:{crc:08x}"


def copy_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
    """Copy the state of a wrapped optimizer, as Keras saves it.

    **Ranks:** local, after `consolidate`; with strategy="sharded" on rank 0. **Cost:** one copy.
    """
    store: dict[str, np.ndarray] = {}
    inner_optimizer(optimizer).save_own_variables(store)
    arrays = {f"inner/{key}": wide(np.asarray(value)) for key, value in store.items()}
    for number, variable in enumerate(_outer_variables(optimizer)):
        arrays[f"outer/{number}"] = _copy(variable)
    return arrays


def set_optimizer(optimizer: keras.optimizers.Optimizer, arrays: Mapping[str, np.ndarray]) -> None:
    """Set a built optimizer's state to the result of `copy_optimizer`. **Ranks:** local."""
    inner_optimizer(optimizer).load_own_variables(_below("inner/", arrays))
    for number, variable in enumerate(_outer_variables(optimizer)):
        variable.assign(arrays[f"outer/{number}"])


def saved_by_keras(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if `model.save` writes an optimizer's state.

    Keras searches the attributes of a model and of its layers, and lists, tuples and dicts among
    these; it does not search nested containers, sets and other objects.
    """
    for layer in layers_of(model):
        for value in vars(layer).values():
            # By identity, because `in` compares by ==, which TensorFlow and NumPy apply to each
            # entry
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
    # A LossScaleOptimizer also lists the variables of its inner optimizer, which "inner/" has
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
        set_optimizer(optimizer, _below(f"optimizer{number}/", arrays))


def _below(first: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with `first`, by the rest of their names."""
    return {name.removeprefix(first): arrays[name] for name in arrays if name.startswith(first)}


def not_finite_in(model: keras.Model) -> str:
    """Return the path of a weight with a NaN or Inf; "" without one. **Ranks:** local."""
    for variable in model.weights:
        is_float = variable.dtype in ("float16", "bfloat16", "float32", "float64")
        if is_float and not keras.ops.all(keras.ops.isfinite(variable)):
            return str(variable.path)
    return ""


def _copy(variable: keras.Variable) -> np.ndarray:
    # TensorFlow's `numpy()` copies already, and Keras's copies that again
    return wide(array_of(variable.value))
