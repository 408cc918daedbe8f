"""What a restored model must hold, to the bit, and the variables that Keras does not save so.

A layer saves and loads its variables as it likes: with LoRA, Dense saves its kernel with the
adapters added and loads adapters of zeros; a quantized layer with LoRA rounds them into its
integers. So rank 0's file has a digest of each variable of the model and of its optimizers, and
those variables themselves that model.save would write otherwise or not at all.
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
    """Return an array that NumPy's files can hold: they know no bfloat16, and float32 holds it.

    Integers stay: float64 does not hold all of 64 bits.
    """
    if array.dtype.kind in "biu":
        return array
    return array.astype(np.promote_types(array.dtype, np.float32))


def exact_arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """Return digests of a model's state, and its variables that Keras's file will not hold.

    **Ranks:** local. **Cost:** one pass over the weights and the state of optimizers.
    """
    values = [np.asarray(keras.ops.convert_to_numpy(one)) for one in model.weights]
    digests = [_digest(value) for value in values]
    lost = _lost(model, digests)
    content = {
        "weights": digests,
        "optimizers": [_digests(one.variables) for one in wrapped_optimizers(model)],
        "tables": tables_of(model),
    }
    arrays = {f"exact{place}": wide(values[place]) for place in lost}
    return {"exact": np.array(json.dumps(content)), **arrays}


def restore_exact(model: keras.Model, path: Path, same_optimizers: Sequence[bool]) -> None:
    """Set the variables that Keras has not loaded exactly; refuse a model that still differs.

    Args:
        model: into which Keras has loaded its file.
        path: of rank 0's file; one of an older writer, without digests, is left alone.
        same_optimizers: whether each wrapped optimizer, in order, must have the saved state.

    **Ranks:** local. **Cost:** one pass over the weights and the state of optimizers.
    **Raises:** CheckpointError that names the variable or layer which differs.
    """
    with np.load(path) as stored:
        if "exact" not in stored:
            return
        content = json.loads(str(stored["exact"]))
        if len(content["weights"]) == len(model.weights):
            for place, variable in enumerate(model.weights):
                name = f"exact{place}"
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
            f"A restored model must hold exactly what was saved. Received {len(variables)} "
            f"variables of {owner}; {path.parent} has {len(digests)}. {REMEDY}"
        )
    for variable, saved, loaded in zip(variables, digests, _digests(variables), strict=True):
        if saved != loaded:
            raise CheckpointError(
                f"A restored model must hold exactly what was saved. Received "
                f"{path_of(variable)!r} of {owner}, which is {loaded} after loading and was "
                f"{saved} (dtype, shape, digest) in {path.parent}. {REMEDY}"
            )


def _lost(model: keras.Model, digests: Sequence[str]) -> list[int]:
    """Return the positions of variables that model.save would not write with their own values."""
    positions = {id(variable): place for place, variable in enumerate(model.weights)}
    saved, others = set(), []
    for value in saved_values(model):
        if id(value) in positions:
            saved.add(positions[id(value)])
        else:
            others.append(_digest(np.asarray(keras.ops.convert_to_numpy(value))))
    spare = Counter(others)
    lost = {positions[id(one)] for one in variables_with_own_files(model) if id(one) in positions}
    for place in sorted(set(positions.values()) - saved - lost):
        if spare[digests[place]]:
            spare[digests[place]] -= 1
        else:
            lost.add(place)
    return sorted(lost)


def _digests(variables: Sequence[Any]) -> list[str]:
    return [_digest(np.asarray(keras.ops.convert_to_numpy(one))) for one in variables]


def _digest(array: np.ndarray) -> str:
    """Return dtype, shape and CRC of an array."""
    crc = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{array.dtype.name}{list(array.shape)}:{crc:08x}"
