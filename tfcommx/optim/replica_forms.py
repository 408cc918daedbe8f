"""Compare how the ranks have made their models: order, classes, settings and tables of layers.

BroadcastState pairs variables by position. Layers that a rank made in another order would train
each other's weights, and nothing in the weights shows it.
"""

import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np

from tfcommx.collectives import process
from tfcommx.core import ConfigurationError
from tfcommx.keras_internals.adapted import recorded_layers
from tfcommx.keras_internals.models import given_name, layers_of, own_variables
from tfcommx.keras_internals.names import path_of
from tfcommx.keras_internals.optimizers import array_of, inner_optimizer
from tfcommx.optim.wrapped import wrapped_optimizers

T = TypeVar("T")
# Settings that differ between ranks in a correct training, because ranks have separate seeds, their
# first weights are replaced by the root's, the rate is a variable, which is broadcast, and a file
# (of a TFSMLayer) may be in a folder of each node.
_NOT_COMPARED = re.compile(
    r"name|seed|learning_rate|vocabulary|bin_boundaries|filepath|.*initializer"
)


class LayerForm(NamedTuple):
    """A layer as the ranks compare it."""

    # Name set by the user; None: made by Keras
    name: str | None
    # For messages: a path of its first variable, or its name
    label: str
    # Compared property -> its value as text
    settings: dict[str, str]


def require_equal_forms(model: keras.Model) -> None:
    """Refuse a model that another rank has made otherwise: other layers, order, settings, tables.

    Names that Keras has numbered may differ: a rank that made another model before has other
    numbers.

    **Ranks:** all. **Cost:** two small exchanges on the host.
    **Raises:** ConfigurationError that names the layer and the ranks.
    """
    # Without the model itself and its inputs, which a loaded model has elsewhere
    inputs = keras.layers.InputLayer
    layers = [layer for layer in layers_of(model)[1:] if not isinstance(layer, inputs)]
    forms = [form_of(layer) for layer in layers]
    gathered = _gather_if_unequal([tuple(form) for form in forms])
    everyone = [[LayerForm._make(form) for form in remote] for remote in gathered]
    for rank, remote in enumerate(everyone):
        _require_equal_names(everyone[0], remote, rank)
        for first, remote_form in zip(everyone[0], remote, strict=False):
            _require_equal_settings(first.label, first.settings, remote_form.settings, rank)
        # After the layers in common, whose first difference says more than two numbers
        if len(remote) != len(everyone[0]):
            raise ConfigurationError(
                "The model must have the same layers on every rank. Received "
                f"{len(everyone[0])} on rank 0 and {len(remote)} on rank {rank}. Build the same "
                "model on every rank."
            )


class AdaptedState(NamedTuple):
    """A preprocessing layer as the ranks compare it."""

    # Class, and the name given by the user
    name: str
    # False for one that this rank has built, and not adapted to data
    adapted: bool
    # Digest of its vocabulary or bins; None: it has none
    table: str | None
    # Such as means and variances
    numbers: list[float]


def require_equal_adapted(model: keras.Model) -> None:
    """Refuse preprocessing layers outside of the model that ranks have adapted to other data.

    Such as those in a data set's `map`. They are compared if the ranks have equally many, of the
    same classes and names, in one order; those in the model are broadcast or compared there.

    **Ranks:** all. **Cost:** two small exchanges on the host.
    **Raises:** ConfigurationError that names the layer and the ranks.
    """
    inside = {id(layer) for layer in layers_of(model)}
    states = [
        _adapted_state_of(layer, adapted)
        for layer, adapted in recorded_layers().items()
        if id(layer) not in inside
    ]
    gathered = _gather_if_unequal([tuple(state) for state in states])
    first, *others = [[AdaptedState._make(state) for state in remote] for remote in gathered]
    for rank, remote in enumerate(others, start=1):
        # One rank alone may have a layer, as to evaluate
        if [state.name for state in remote] == [state.name for state in first]:
            for state, remote_state in zip(first, remote, strict=True):
                _require_equal_states(state, remote_state, rank)


def _adapted_state_of(layer: keras.layers.Layer, adapted: bool) -> AdaptedState:
    parts = [getattr(layer, name, None) for name in ("mean", "variance", "idf_weights")]
    arrays = [np.ravel(array_of(part)).astype(np.float64) for part in parts if part is not None]
    name = f"{type(layer).__name__} {given_name(layer) or ''}".strip()
    numbers = np.concatenate([np.zeros(0), *arrays]).tolist()
    return AdaptedState(name, adapted, _table_of(layer), numbers)


def _require_equal_states(first: AdaptedState, second: AdaptedState, rank: int) -> None:
    # Not by all bits, because processors of other types round differently
    equal = first.table == second.table and (
        np.shape(first.numbers) == np.shape(second.numbers)
        and np.allclose(first.numbers, second.numbers, rtol=1e-3, equal_nan=True)
    )
    # Weights that one rank alone has loaded may belong to another model, which is broadcast later
    if equal or not (first.adapted or second.adapted):
        return
    values = [_short(str(state.table or state.numbers)) for state in (first, second)]
    raise ConfigurationError(
        "A preprocessing layer must be adapted to the same data on every rank. Received "
        f"{first.name}, which the model does not hold, with {values[0]} on rank 0 and {values[1]} "
        f"on rank {rank}. Adapt it to all data, or share one rank's state before the layer is "
        "used: cx.broadcast_variables(layer.variables) for Normalization; "
        "layer.set_vocabulary(comm.gather_objects(layer.get_vocabulary())[0]) for a vocabulary, "
        "where comm = cx.init(). BroadcastState(compare=False) trains with the difference."
    )


def require_equal_optimizers(model: keras.Model) -> None:
    """Refuse optimizers whose settings differ between ranks; the learning rate is broadcast.

    **Ranks:** all. **Cost:** two small exchanges on the host. **Raises:** ConfigurationError.
    """
    forms = [
        (optimizer.name, _settings_of(optimizer) | _settings_of(inner_optimizer(optimizer)))
        for optimizer in wrapped_optimizers(model)
    ]
    everyone = _gather_if_unequal([settings for _, settings in forms])
    for rank, remote in enumerate(everyone):
        for (name, _), first, other in zip(forms, everyone[0], remote, strict=False):
            _require_equal_settings(f"the optimizer {name!r}", first, other, rank)


def tables_of(model: keras.Model) -> dict[str, str]:
    """Return a digest of each table that a layer keeps outside of its variables, by layer.

    Vocabularies of StringLookup, IntegerLookup and TextVectorization, bins of Discretization.
    """
    tables = {}
    for position, layer in enumerate(layers_of(model)):
        if (table := _table_of(layer)) is not None:
            tables[f"{position} ({given_name(layer) or type(layer).__name__})"] = table
    return tables


def form_of(layer: keras.layers.Layer) -> LayerForm:
    variables = own_variables(layer)
    label = path_of(variables[0]) if variables else layer.name
    settings = {"class": type(layer).__name__, "dtype policy": str(layer.dtype_policy.name)}
    if layer.built and variables:
        flags = [bool(variable.trainable) for variable in variables]
        settings["trainable"] = repr(flags if len(set(flags)) > 1 else flags[0])
        settings["layer.trainable"] = repr(bool(layer.trainable))
    if not isinstance(layer, keras.Model):
        settings |= {f"argument {name}": text for name, text in _settings_of(layer).items()}
    if (table := _table_of(layer)) is not None:
        settings["vocabulary or bins"] = table
    return LayerForm(given_name(layer), label, settings)


def _table_of(layer: keras.layers.Layer) -> str | None:
    read = getattr(layer, "get_vocabulary", None)
    try:
        table = read() if callable(read) else getattr(layer, "bin_boundaries", None)
    except Exception:  # Any exception: no vocabulary yet, or a method of the user
        return None
    if table is None:
        return None
    entries = [str(entry) for entry in table]
    return f"{len(entries)} entries, digest {zlib.crc32('|'.join(entries).encode()):08x}"


def _settings_of(owner: Any) -> dict[str, str]:
    """Return the numbers, flags and words of an owner's config, as text."""
    try:
        config = owner.get_config()
    except Exception:  # Any exception: it is the user's method
        return {}
    of_keras = type(owner).__module__.startswith(("keras.", "tfcommx."))
    settings = {"class": type(owner).__name__}
    for name, value in config.items():
        if name == "learning_rate" and isinstance(value, dict):  # A schedule, not a variable
            settings[name] = repr(_plain(value, words=True))
        elif not _NOT_COMPARED.fullmatch(name) and (
            value is None
            or isinstance(value, bool | int | float | np.number | list | tuple)
            # Words of a user may be specific to this rank, such as the path of a file
            or (of_keras and isinstance(value, str))
            or name.endswith(("regularizer", "constraint"))
        ):
            settings[name] = repr(_plain(value, words=of_keras))
    return settings


def _plain(value: Any, words: bool) -> Any:
    """Return a value without parts that differ between processes, such as addresses."""
    if isinstance(value, dict):
        return {
            key: _plain(part, words)
            for key, part in sorted(value.items())
            if key not in ("name", "seed", "module", "build_config")
        }
    if isinstance(value, list | tuple):
        return [_plain(part, words) for part in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, bool | int | float | None) or (words and isinstance(value, str)):
        return value
    return type(value).__name__


def _gather_if_unequal(forms: list[T]) -> list[list[T]]:
    """Return the forms of all ranks; those of this one alone if all are equal."""
    comm = process.current()
    # Digests first, because the forms of a large model are long, and nearly always equal
    digests = comm.gather_objects(zlib.crc32(repr(forms).encode()))
    return [forms] if len(set(digests)) == 1 else comm.gather_objects(forms)


def _require_equal_names(
    first: Sequence[LayerForm], remote: Sequence[LayerForm], rank: int
) -> None:
    """Refuse layers that the user named differently, or in another order."""
    pairs = [(a, b) for a, b in zip(first, remote, strict=False) if a.name != b.name]
    reordered = sorted(map(str, (a.name for a, _ in pairs))) == sorted(
        map(str, (b.name for _, b in pairs))
    )
    for local_form, remote_form in pairs:
        if local_form.name is None or remote_form.name is None:
            continue
        # Names that a user derives from Keras's, such as "dense_3_out", have other numbers
        plain, others_plain = (
            re.sub(r"_?\d+", "", name) for name in (local_form.name, remote_form.name)
        )
        if reordered or plain != others_plain:
            raise ConfigurationError(
                "Layers must be made in the same order, with the same names, on every rank: their "
                f"variables are paired by position. Received {local_form.label!r} (of layer "
                f"{local_form.name!r}) on rank 0, where rank {rank} has {remote_form.label!r} (of "
                f"layer {remote_form.name!r}). Make the layers in a fixed order, such as that of "
                "sorted(...): that of a set differs between processes."
            )


def _require_equal_settings(
    label: str, first: dict[str, str], second: dict[str, str], rank: int
) -> None:
    for name in first:
        if name in second and first[name] != second[name]:
            raise ConfigurationError(
                "Layers and optimizers must have the same settings on every rank. Received for "
                f"{label} {name} = {_short(first[name])} on rank 0 and {_short(second[name])} on "
                f"rank {rank}. Build and compile the same model on every rank, from the same "
                "files; BroadcastState(compare=False) trains with the difference."
            )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
