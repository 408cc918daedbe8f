"""The file of one rank in a checkpoint: residuals, accumulated gradients, seeds.

The file is NumPy's: arrays, and an index (JSON) with one entry for each wrapped optimizer, which
assigns the arrays to variables.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfcommx.checkpoint.files import Head, arrays_in
from tfcommx.checkpoint.followers import follower_arrays
from tfcommx.checkpoint.place import head_array, head_in
from tfcommx.checkpoint.state import copy_optimizer, exact_arrays, saved_by_keras, wide
from tfcommx.collectives import process
from tfcommx.core import CheckpointError, replacing
from tfcommx.keras_internals.models import all_generators, recurrent_states, statistics_of
from tfcommx.keras_internals.optimizers import (
    kinds_of,
    state_kinds,
    trainable_variables,
    unlisted,
)
from tfcommx.optim.wrapped import accumulated, exchanger_in, wrapped_optimizers
from tfcommx.runtime.gradient_state import GradientState, Vectors
from tfcommx.strategies.strategy import CommonState

# Entries of a block; blocks of zeros are left out of the file
BLOCK = 1024
# Key of an array in the index, which no variable has
ARRAY = ""
# Name in messages
FILE = "A rank's file of a checkpoint"


class OptimizerRecord(NamedTuple):
    """The state of one wrapped optimizer on one rank."""

    # Names of the variables that the optimizer was built for, in its order
    trained: list[str]
    # State of the exchange of gradients
    gradients: GradientState
    # The unit of its residuals: "gradients" or "updates"
    residuals_of: str
    # Sums of gradients that are being accumulated, at least float32
    accumulated: Vectors
    # State of the optimizer that Keras does not save, by attribute
    unlisted: dict[str, np.ndarray]
    # Seeds of the model's generators, in the order of its layers
    seeds: list[list[int]]
    # Names of all variables of the model, in its order
    weights: list[str] = []  # noqa: RUF012 - never changed
    # State of the strategy, equal on all ranks; only rank 0 writes it
    common: CommonState = {}  # noqa: RUF012 - never changed
    # The optimizer's state, if Keras does not save it; only rank 0 writes it
    state: dict[str, np.ndarray] = {}  # noqa: RUF012 - never changed
    # Names of the optimizer's class and its bases; kinds of its state
    kinds: list[str] = []  # noqa: RUF012 - never changed
    state_kinds: list[str] = []  # noqa: RUF012 - never changed

    @property
    def variables(self) -> set[str]:
        """Names of the variables with state in this record."""
        return {*self.accumulated, *self.common, *self.gradients.variables}


def record_of(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, seeds: list[list[int]]
) -> OptimizerRecord:
    """Return this rank's state of one of a model's optimizers; `seeds` are the model's."""
    exchanger = exchanger_in(optimizer)
    # `model.save` writes only optimizers that Keras finds in the attributes of the model
    writes_state = exchanger.comm.rank == 0 and not saved_by_keras(model, optimizer)
    return OptimizerRecord(
        trained=exchanger.names.of(trainable_variables(optimizer)),
        gradients=exchanger.export(),
        residuals_of=exchanger.residuals_of,
        accumulated={
            name: wide(np.ravel(total.numpy())) for name, total in accumulated(optimizer).items()
        },
        unlisted={name: wide(state.numpy()) for name, state in unlisted(optimizer).items()},
        seeds=seeds,
        weights=exchanger.names.of(model.weights),
        common=exchanger.common_state() if exchanger.comm.rank == 0 else {},
        state=copy_optimizer(optimizer) if writes_state else {},
        kinds=kinds_of(optimizer),
        state_kinds=state_kinds(optimizer),
    )


def write_residuals(model: keras.Model, path: Path, writes_model: bool, head: Head) -> None:
    """Write this rank's state of each of the model's wrapped optimizers, and the head of the save.

    The rank that writes the model adds those of `exact_arrays`, to check a restored model.
    """
    exact = exact_arrays(model) if writes_model else {}
    with replacing(path) as part, part.open("wb") as file:
        arrays = {"head": head_array(head._replace(notes={})), **residual_arrays(model), **exact}
        np.savez(file, **arrays)  # type: ignore[arg-type] # None is called allow_pickle


def residual_arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """Return copies: this rank's file, with the state of each wrapped optimizer of the model."""
    seeds = [generator.state.numpy().tolist() for generator in all_generators(model)]
    arrays: dict[str, np.ndarray] = {}
    records = [record_of(model, optimizer, seeds) for optimizer in wrapped_optimizers(model)]
    index = [_as_json(record, arrays) for record in records]
    for number, variable in enumerate(own_variables(model)):
        arrays[f"own{number}"] = wide(variable.numpy())
    for number, state in enumerate(recurrent_states(model)):
        arrays[f"recurrent{number}"] = wide(state.numpy())
    if process.current().rank == 0:  # It has the callbacks of all ranks, and more
        arrays |= follower_arrays(model)
    return {"index": np.array(json.dumps(index)), **arrays}


def own_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that differ between ranks in mid-epoch: statistics, then metrics."""
    # `RestoreRankValues` splits the arrays of the file by the number of statistics
    return [*statistics_of(model), *model.metrics_variables]


def read_own(path: Path, kind: str = "own") -> list[np.ndarray]:
    """Return the values of a rank's `own_variables`, or with "recurrent" of `recurrent_states`.

    **Raises:** CheckpointError for a damaged file.
    """
    with arrays_in(path, FILE) as stored:
        names = (f"{kind}{number}" for number in range(len(stored.files)))
        return [stored[name] for name in names if name in stored]


def _spans(vector: np.ndarray) -> list[list[int]]:
    """Return start and stop of the ranges with any bit, in units of BLOCK entries.

    >>> _spans(np.repeat([0, 1, 0, 1], [BLOCK, 1, 2 * BLOCK, 1]))
    [[1024, 2048], [3072, 3074]]
    """
    # By its bits, because a restored state is compared to the bit, and -0.0 equals 0
    bits = vector.view(f"u{vector.itemsize}")
    used = np.logical_or.reduceat(bits != 0, np.arange(0, vector.size, BLOCK))
    # False at both ends, so that a range at an end of the vector has two edges, too
    edges = np.flatnonzero(np.diff(np.concatenate([[False], used, [False]]))) * BLOCK
    return np.minimum(edges, vector.size).reshape(-1, 2).tolist()


def _as_json(record: OptimizerRecord, arrays: dict[str, np.ndarray]) -> Any:
    """Return a record as JSON, with its arrays by name; add these to the file's arrays."""

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: put(part) for name, part in value.items()}
        if not isinstance(value, np.ndarray | np.generic):
            return value
        value = np.asarray(value)  # NumPy's number for a scalar variable, such as Nadam's product
        name, size = f"array{len(arrays)}", value.size
        spans = _spans(value) if value.ndim == 1 and value.dtype.kind == "f" and size else None
        if spans is not None:  # Without blocks of zeros, such as the shards of other ranks
            # With an empty piece, because NumPy refuses to concatenate nothing: all may be zeros
            value = np.concatenate([value[:0], *(value[start:stop] for start, stop in spans)])
        arrays[name] = value
        return {ARRAY: [name, size, spans]}

    return put(record._asdict() | {"gradients": vars(record.gradients)})


def read_residuals(path: Path, head: Head | None = None) -> list[OptimizerRecord]:
    """Return the records in a rank's file, one for each wrapped optimizer.

    Args:
        head: the save to which the file must belong; None: any.

    **Raises:** CheckpointError for a damaged file, and for a file of another save.
    """
    with arrays_in(path, FILE) as stored:
        # A head that a user has written by hand has no tag, and belongs to any files
        if head is not None and head.tag:
            _require_save(head, head_in(stored) if "head" in stored else None, path)
        return [_record_in(entry, stored) for entry in json.loads(str(stored["index"]))]


def _require_save(head: Head, stored: Head | None, path: Path) -> None:
    """Refuse the file of another save, such as of an earlier run on this node's disk."""
    # The ranks' files were written without notes and older saves
    wanted = head._replace(notes={}, older=())
    if stored is None or stored._replace(notes={}, older=()) != wanted:
        raise CheckpointError(
            f"A file of {_in_words(wanted)} is required. Received {path}, which is of "
            f"{_in_words(stored)}. Copy the files of one save to all nodes."
        )


def _in_words(head: Head | None) -> str:
    if head is None:
        return "a save without a tag"
    return (
        f"save {head.save} (epoch {head.epoch}, step {head.step}, {head.ranks} ranks, tag "
        f"{head.tag or 'none'})"
    )


def _record_in(entry: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> OptimizerRecord:
    """Return the record that `_as_json` made an entry of the index."""

    def get(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if ARRAY not in value:
            return {name: get(part) for name, part in value.items()}
        name, size, spans = value[ARRAY]
        entries, read = stored[name], 0
        if spans is None:
            return entries
        vector = np.zeros(size, entries.dtype)
        for start, stop in spans:
            vector[start:stop] = entries[read : read + stop - start]
            read += stop - start
        return vector

    fields = get(entry)
    return OptimizerRecord(**fields | {"gradients": GradientState(**fields["gradients"])})
