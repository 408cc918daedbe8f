"""Save the variables that Keras alters, and check that a restored model is equal bit for bit.

A layer may save its variables in another form: with LoRA, Dense saves its kernel with the adapters
added and loads adapters of zeros; a quantized layer with LoRA rounds them into its integers.
Therefore rank 0's file has a digest of each variable of the model and of its optimizers, and the
variables that model.save would alter or omit.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfcommx.core import CheckpointError
from tfcommx.keras_internals import saved_values, variables_with_own_files
from tfcommx.optim.replica_forms import tables_of
from tfcommx.optim.requested_plan import path_of
from tfcommx.optim.wrapped import wrapped_optimizers

REMEDY = (
    "Build and compile the model as it was when it was saved: the same layers, dtypes, LoRA and "
    "quantization, and the same kind of learning rate."
)


def wide(array: np.ndarray) -> np.ndarray:
    """Return an array of a type that NumPy's files can hold: float32 in place of bfloat16.

    Integers stay, because float64 does not hold all 64 bits.
    """
    if array.dtype.kind in "biu":
        return array
    return array.astype(np.promote_types(array.dtype, np.float32))


def exact_arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """Return digests of a model's state, and its variables that Keras's file will not hold.

    **Ranks:** local. **Cost:** one pass over the weights and the state of optimizers.
    """
    values = [np.asarray(keras.ops.convert_to_numpy(weight)) for weight in model.weights]
    digests = [_digest(value) for value in values]
    lost = _lost(model, digests)
    content = {
        "weights": digests,
        "optimizers": [_digests(wrapped.variables) for wrapped in wrapped_optimizers(model)],
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
    with np.load(path) as stored:
        content = json.loads(str(stored["exact"]))
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
            extra_digests.append(_digest(np.asarray(keras.ops.convert_to_numpy(value))))
    # Layers may save copies of variables, which are found by their values
    spare = Counter(extra_digests)
    special = map(id, variables_with_own_files(model))
    lost = {positions[identity] for identity in special if identity in positions}
    for position in sorted(set(positions.values()) - saved - lost):
        if spare[digests[position]]:
            spare[digests[position]] -= 1
        else:
            lost.add(position)
    return sorted(lost)


def _digests(variables: Sequence[Any]) -> list[str]:
    return [_digest(np.asarray(keras.ops.convert_to_numpy(variable))) for variable in variables]


def _digest(array: np.ndarray) -> str:
    crc = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{array.dtype.name}{list(array.shape)}:{crc:08x}"
